"""Modules of tensor-parallel stages: cut by hand, cut by torch, and whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.samples.models import WIDTH

SHARDS_OF_BLOCK = {"*.up": ("tp", 0), "*.up_bias": ("tp", 0), "*.down": ("tp", 1)}
DIMENSIONS = {"up": 0, "up_bias": 0, "down": 1}


class Copied(torch.autograd.Function):
    """Equal on all shards; so is its gradient, once it is added up (arXiv 1909.08053, f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Added(torch.autograd.Function):
    """The sum over the shards (arXiv 1909.08053, g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Block(nn.Module):
    """Two linear layers, the first one split by columns and the second one by rows."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        shards, shard = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.mesh = mesh
        self.norm = nn.LayerNorm(WIDTH)
        up, up_bias, down = (
            torch.randn(2 * WIDTH, WIDTH),
            torch.randn(2 * WIDTH),
            torch.randn(WIDTH, 2 * WIDTH),
        )
        self.up = nn.Parameter(up.chunk(shards)[shard].clone())
        self.up_bias = nn.Parameter(up_bias.chunk(shards)[shard].clone())
        self.down = nn.Parameter(down.chunk(shards, 1)[shard].clone() / WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.mesh is not None:
            y = Copied.apply(y, self.mesh.get_group())
        y = F.linear(F.linear(y, self.up, self.up_bias).tanh(), self.down)
        if self.mesh is not None:
            y = Added.apply(y, self.mesh.get_group())
        return x + y + self.bias


class Forgetful(Block):
    """Leaves each shard its part of the gradients of what stands before the cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(F.linear(self.norm(x), self.up, self.up_bias).tanh(), self.down)
        return x + Added.apply(y, self.mesh and self.mesh.get_group()) + self.bias


class InTurn(Block):
    """All shards of a block, one after the other: rounds as several processes do."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(None)
        self.num_shards = num_shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        parts = [
            F.linear(F.linear(y, up, bias).tanh(), down.contiguous())
            for up, bias, down in zip(
                self.up.chunk(self.num_shards),
                self.up_bias.chunk(self.num_shards),
                self.down.chunk(self.num_shards, 1),
                strict=True,
            )
        ]
        return x + sum(parts[1:], start=parts[0]) + self.bias


class Parallelized(nn.Module):
    """The same by torch's own tensor parallelism."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        whole = Block(None)
        self.norm, self.bias = whole.norm, whole.bias
        self.first = nn.utils.skip_init(nn.Linear, WIDTH, 2 * WIDTH)
        self.second = nn.utils.skip_init(nn.Linear, 2 * WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(whole.up)
            self.first.bias.copy_(whole.up_bias)
            self.second.weight.copy_(whole.down)
        if mesh is not None:
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self, mesh, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x)).tanh()) + self.bias


NAMES = {
    "first.weight": "up",
    "first.bias": "up_bias",
    "second.weight": "down",
}
