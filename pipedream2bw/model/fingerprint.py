"""What distinguishes one model's parameters from another's."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Sequence

import torch
from torch import nn

_SAMPLE = 4096


def sampled_values(tensor: torch.Tensor) -> str:
    """Hashes the values of at most 4,096 elements, which lie evenly in the tensor."""
    step = max(1, tensor.numel() // _SAMPLE)
    sample = tensor.detach().flatten()[::step].cpu().contiguous()
    values = ctypes.string_at(sample.data_ptr(), sample.nbytes)
    return hashlib.blake2b(values, digest_size=8).hexdigest()


def fingerprint_of(parameters: Sequence[str], layers: Sequence[str]) -> str:
    """Hashes the parameters (see :func:`describe_parameters`) and layer names of a model."""
    text = json.dumps([parameters, layers])
    return hashlib.sha256(text.encode()).hexdigest()


def describe_parameters(
    root: nn.Module, dtype_of: Callable[[str, nn.Parameter], torch.dtype] | None = None
) -> tuple[str, ...]:
    """Describes each parameter in a line: name, shape, dtype, and whether it is frozen.

    ``dtype_of`` gives the dtypes that the parameters will have, if they will have others.
    """
    return tuple(
        f"{name} {list(parameter.shape)} "
        f"{parameter.dtype if dtype_of is None else dtype_of(name, parameter)}"
        + ("" if parameter.requires_grad else " frozen")
        for name, parameter in root.named_parameters()
    )


def name_and_shape(line: str) -> tuple[str, list[int]]:
    """What a line of :func:`describe_parameters` says first."""
    name, _, rest = line.partition(" [")
    return name, [int(size) for size in rest.partition("]")[0].split(", ") if size]
