"""Tensors in structures of lists, tuples and dictionaries, and in records."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import types
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in a structure, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_in(tree: Any) -> int:
    """Returns the number of bytes of all tensors in a structure."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def as_received(tree: Any) -> Any:
    """Returns a structure whose tensors are as a stage receives them.

    They are without history, and require gradients as before.
    """
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), tree
    )


_RECORDS = (collections.UserDict, types.SimpleNamespace, argparse.Namespace)


class _Opened:
    """A record as a node of a structure. It is unflattened to a copy of the record.

    Args:
        record: an object of which torch's pytrees know nothing.
        fields: its attributes by name.
    """

    def __init__(self, record: Any, fields: dict[str, Any]) -> None:
        self.record = record
        self.fields = fields


def _closed(values: Any, context: Any) -> Any:
    record, names = context
    made = copy.copy(record)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also of a frozen dataclass
    return made


pytree.register_pytree_node(
    _Opened,
    lambda node: (list(node.fields.values()), (node.record, tuple(node.fields))),
    _closed,
    flatten_with_keys_fn=lambda node: (
        [(pytree.GetAttrKey(name), value) for name, value in node.fields.items()],
        (node.record, tuple(node.fields)),
    ),
)


def opened(tree: Any) -> Any:
    """The structure in which dataclasses, UserDicts and namespaces are nodes.

    ``pytree.tree_flatten`` looks into them then, and ``tree_unflatten`` makes copies of them.
    """
    return pytree.tree_map(_opened, tree)


def _opened(leaf: Any) -> Any:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    elif isinstance(leaf, _RECORDS):
        names = list(vars(leaf))
    else:
        return leaf
    return _Opened(leaf, {name: opened(getattr(leaf, name)) for name in names})


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf of an opened structure is an object that has tensors as attributes."""
    known = isinstance(leaf, (torch.Tensor, torch.nn.Module, type)) or not hasattr(leaf, "__dict__")
    return not known and bool(tensors_in(list(vars(leaf).values())))
