"""Tensors in structures of lists, tuples and dictionaries."""

from __future__ import annotations

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
