"""The outputs of microbatches, joined, and compared with those of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import CALLED


def devices_of(outputs: Sequence[Any]) -> list[torch.device | None]:
    """Where outputs are; None: no tensor."""
    return [item.device if isinstance(item, torch.Tensor) else None for item in outputs]


def joined(
    parts: Sequence[Sequence[Any]], devices: Sequence[torch.device | None]
) -> tuple[Any, ...]:
    """Each output of the graph, of all microbatches: tensors along dimension 0, on its device.

    Raises:
        ValueError: an output has no rows.
    """
    outputs = []
    for number, (*values, device) in enumerate(zip(*parts, devices, strict=True)):
        if not isinstance(values[0], torch.Tensor):
            outputs.append(values[0])
        elif values[0].dim() == 0:
            raise ValueError(
                f"{CALLED}: output {number}: shape [], it must have rows in dimension 0 to be put "
                "together from those of microbatches"
            )
        else:
            outputs.append(torch.cat(values).to(device))
    return tuple(outputs)


def _compared(one: torch.Tensor, other: torch.Tensor) -> tuple[bool, str]:
    """Whether two tensors are the same but for rounding, and how they differ."""
    limit = 1e-2 if one.dtype.itemsize < 4 else 1e-4
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    elif not one.is_floating_point():
        return torch.equal(one, other), "other whole numbers"
    one, other = one.double(), other.double()
    is_finite = one.isfinite() & other.isfinite()
    if not torch.allclose(one[~is_finite], other[~is_finite], rtol=0, atol=0, equal_nan=True):
        return False, "infinite, or no numbers, in other places"
    numbers = one[is_finite]
    if numbers.numel() == 0:
        return True, ""
    scale = numbers.abs().max().item()
    largest = (numbers - other[is_finite]).abs().max().item()
    return largest <= limit * max(scale, 1e-30), (
        f"differing by {largest:.3g}, values up to {scale:.3g}"
    )


def check_same(whole: Sequence[Any], split: Sequence[Any], count: int) -> None:
    """Raises ValueError unless microbatches give what the whole gives, but for rounding."""
    for number, (one, other) in enumerate(zip(whole, split, strict=True)):
        if not isinstance(one, torch.Tensor):
            same = one == other
            found = f"{one} and {other}"
        elif one.shape != other.shape:
            same, found = False, f"shapes {list(one.shape)} and {list(other.shape)}"
        else:
            same, found = _compared(one, other)
        if not same:
            raise ValueError(
                f"{CALLED}: output {number} of {count} microbatches and of the whole: {found}: "
                "rows depend on each other, or random numbers are drawn. Call model.eval(), or "
                "leave out the backend"
            )
