"""Models that are initialised in every way that constructors know, and how to make them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pipedream2bw as pd2
from tests.samples.models import WIDTH


class Rotated(nn.Module):
    """Buffers and plain tensors that are computed, and one that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 10.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("signs", torch.tensor([1.0, -1.0] * (WIDTH // 2)))
        self.signs.mul_(0.5)
        self.phases = torch.outer(torch.ones(2), self.frequencies).sin()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.cat([self.frequencies, self.phases[1]]) * self.signs
        return self.linear(x[..., self.order] * angles.cos())


class Dropping(nn.Module):
    """Numbers that Python reads off tensors while it constructs."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
        self.scales = [1.0 - rate for rate in rates]
        probabilities = torch.rand(4).softmax(0)
        self.picked = int(torch.multinomial(probabilities, 1))
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        with torch.no_grad():
            mask = torch.bernoulli(torch.full((WIDTH, WIDTH), 0.5))
            self.ways[0].weight[mask.nonzero()[:, 0]] *= 0.5
            if self.ways[1].weight.abs().max() > 0:
                self.ways[1].weight.mul_(mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, way in zip(self.scales, self.ways, strict=True):
            x = x + way(x).tanh() * scale
        return x * (1 + self.picked)


class Initialised(nn.Module):
    """Every kind of initialisation, also over an earlier one and by way of other tensors."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        generator = generator or torch.Generator().manual_seed(5)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        nn.init.orthogonal_(self.first.weight, gain=1.2)
        nn.init.trunc_normal_(self.second.weight, std=0.3, generator=generator)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t().bernoulli_(0.4) - 0.4)
        self.wide = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH))
        with torch.no_grad():
            self.wide[:, :WIDTH].normal_(generator=generator)
            self.wide[:, WIDTH:].copy_(self.matrix.flip(0))
        self.frozen = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.from_numpy(np.linspace(0, 1, WIDTH, dtype=np.float32)) * 2)
        self.first.bias.data = torch.rand(2 * WIDTH, generator=generator) - 0.5
        self.second.bias.data.uniform_(-0.1, 0.1)
        self.second.to(torch.float64).to(torch.float32)
        self.scale.note = "kept"  # type: ignore[attr-defined]
        self.apply(self.shrink)

    @staticmethod
    def shrink(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter[:1], std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh()) @ self.frozen + x * self.scale
        x = x @ self.matrix + x @ self.transposed
        return (x @ self.wide).unflatten(-1, (2, -1)).sum(-2).tanh()


class Tied(nn.Module):
    """Two layers share a weight, which the later one owns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up.weight = self.down.weight
        nn.init.xavier_normal_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def layers() -> nn.Module:
    """All of them in a row, five layers."""
    return nn.Sequential(
        Rotated(),
        Dropping(),
        Initialised(),
        Tied(),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )


def loadable() -> nn.Module:
    """Whose checkpoint has all of its values."""
    modules: list[nn.Module] = [Initialised(), nn.BatchNorm1d(WIDTH), Tied(), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*modules, *(nn.Linear(WIDTH, WIDTH) for _ in range(2)))


def deferred(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return pd2.deferred_init(build)
