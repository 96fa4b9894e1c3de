"""What a stage sends another one: tensors, or pytrees of tensors and constants."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import _C


def check_plain(names: Sequence[str], values: Sequence[Any]) -> None:
    """Raises TypeError, naming the value, for tensors of classes that other processes lack.

    Their memory may be others', or none.
    """
    for name, value in zip(names, values, strict=True):
        if type(value) is torch.Tensor:
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, nn.Parameter):
                raise TypeError(
                    f"value {name} between stages: a {type(leaf).__name__} given, processes send "
                    "plain tensors. Begin the stage at another layer (split=), or make it a plain "
                    "tensor before, such as a DTensor's to_local() or full_tensor()"
                )


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
