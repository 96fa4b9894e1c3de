"""Parts of tensors in a checkpoint: each process of a tensor-parallel stage saves its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..model.checkpoint import PART
from ..model.local_shards import Part

Place = tuple[str, ...]
"""The files of a tensor's parts, in their order; one file has the whole tensor."""


def name_of_part(name: str, number: int, num_parts: int) -> str:
    """The name under which a part is saved."""
    return name if num_parts == 1 else f"@{number}-of-{num_parts}/{name}"


def split_name(saved: str) -> tuple[str, int, int]:
    """A tensor's name, the number of the part that was saved so, and how many there are."""
    found = PART.fullmatch(saved)
    return (found[3], int(found[1]), int(found[2])) if found else (saved, 0, 1)


def files_of(name: str, place: Place, part: Part | None, cut: int = 0) -> Mapping[str, str]:
    """The names to read for a process's part, with the file of each.

    Args:
        cut: the dimension in which the parts that were saved are cut.
    """
    num_parts = len(place)
    if part is not None and (part.num_parts, part.dimension) == (num_parts, cut):
        return {name_of_part(name, part.number, num_parts): place[part.number]}
    return {name_of_part(name, number, num_parts): file for number, file in enumerate(place)}


def part_of_these(
    name: str, tensors: Sequence[torch.Tensor], cut: int, like: Sequence[int], part: Part | None
) -> torch.Tensor:
    """A process's part of what was saved as other parts, or the whole.

    Args:
        tensors: all parts that were saved, in their order.
        cut: the dimension in which they are.
        like: the whole parameter's shape. What an optimizer keeps of it may have another one.

    Raises:
        ValueError: what has another shape differs between the parts, or is of the whole parameter.
    """
    first, num_parts = tensors[0], len(tensors)
    of_part = [size // num_parts if at == cut else size for at, size in enumerate(like)]
    if all(list(tensor.shape) == of_part for tensor in tensors):
        whole = torch.cat(list(tensors), cut) if num_parts > 1 else first
        return whole if part is None else part.of(whole)
    if first.dim() == 0 and all(torch.equal(tensor, first) for tensor in tensors):
        return first
    wanted = 1 if part is None else part.num_parts
    raise ValueError(
        f"{name}: shape {list(first.shape)} of a parameter of shape {list(like)}, saved by "
        f"{num_parts} processes of a stage: {wanted} cannot go on with it, {num_parts} can"
    )
