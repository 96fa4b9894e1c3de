"""What the survey knows of a model, and one loss for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a call."""


@dataclasses.dataclass(frozen=True)
class Model:
    library: str
    name: str
    build: Callable[[], nn.Module]
    """Called after ``torch.manual_seed``."""
    example: Callable[[int], Example]
    """A call's arguments with that many rows."""


def mean_square(output: Any, target: Any) -> torch.Tensor:
    """The mean over the rows of all that the model returns in floating point."""
    found = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    return torch.stack([leaf.float().square().mean() for leaf in found]).sum()
