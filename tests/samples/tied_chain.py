"""A chain of layers whose first and last share a weight, and a loss in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss


class TiedChain(nn.Module):
    """A layer, three others, and a last layer with the first one's weight."""

    def __init__(self, width: int, make_layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.between = nn.Sequential(*(make_layer() for _ in range(3)))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.between(self.first(x)))
        return result


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.float(), target)
