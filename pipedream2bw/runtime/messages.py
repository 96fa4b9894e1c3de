"""What a stage sends another one: tensors, or pytrees of tensors and constants."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _C


def pack(values: list[Any]) -> _C.Message:
    """A message for values that are tensors or pytrees of tensors and constants."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return _C.Message(b"", values)
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _IsTensor

    structure = pickle.dumps(pytree.tree_map(take, values))
    return _C.Message(structure, tensors)


def unpack(structure: bytes, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values of a message with structure."""
    remaining = iter(tensors)
    values: list[Any] = pytree.tree_map(
        lambda leaf: next(remaining) if leaf is _IsTensor else leaf, pickle.loads(structure)
    )
    return values


class _IsTensor:
    """Stands for a tensor among a message's constants."""
