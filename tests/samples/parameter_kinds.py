"""Small models whose parameters are of every kind, each with what it is trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.references.oracle import Batch
from tests.samples.models import TASKS, WIDTH, Branch, Exit, Task

draw = TASKS["mlp"].draw


def stack(wrap: Callable[[nn.Module], nn.Module], count: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh()]
    return nn.Sequential(*layers)


class LowRank(nn.Module):
    """A frozen linear layer and a trained adapter (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, WIDTH) / 3)
        self.up = nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t() * 2.0
        return result


class Quantised(nn.Module):
    """A frozen weight of whole numbers under a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.whole.to(x.dtype) * self.scale)).tanh()


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


class Rotation(nn.Module):
    """Its own parameter is parametrized, not a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH))
        parametrizations.orthogonal(self, "turn")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turn


class SharesWithin(nn.Module):
    """Layers that share a weight, one that is called twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh()) + self.shift
        return self.first(x).tanh()


def _symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def _turning() -> nn.Module:
    parts = [Rotation(), _symmetric(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Rotation()]
    return nn.Sequential(*parts, parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def _after_a_forward() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh()]
    model = nn.Sequential(*layers)
    model(torch.randn(3, WIDTH))
    return model


def _signed_by_row(rows: int) -> Batch:
    """Each microbatch goes its own way, so some parameters have no gradient in some of them."""
    sign = torch.randint(2, (rows,)) * 2.0 - 1.0
    return Batch((torch.randn(rows, WIDTH), sign), torch.randn(rows, WIDTH))


PARAMETRIZED = {
    "orthogonal": Task(functools.partial(stack, parametrizations.orthogonal), draw),
    "householder": Task(
        lambda: stack(lambda m: parametrizations.orthogonal(m, orthogonal_map="householder")), draw
    ),
    "spectral norm": Task(functools.partial(stack, parametrizations.spectral_norm), draw),
    "spectral norm, old": Task(functools.partial(stack, nn.utils.spectral_norm), draw),
    "weight norm": Task(functools.partial(stack, parametrizations.weight_norm), draw),
    "weight norm, old": Task(functools.partial(stack, nn.utils.weight_norm), draw),
    "a user's": Task(functools.partial(stack, _symmetric), draw),
    "own parameters": Task(_turning, draw),
}

KINDS = {
    "low rank": Task(functools.partial(stack, LowRank), draw),
    "quantised": Task(lambda: nn.Sequential(*[Quantised() for _ in range(4)]), draw),
    "was lazy": Task(_after_a_forward, draw),
    "shared within": Task(lambda: [SharesWithin() for _ in range(4)], draw, depths=(4,)),
    "some microbatches": Task(
        lambda: [Branch(), Branch(), Branch(), Exit()], _signed_by_row, depths=(4,)
    ),
    **PARAMETRIZED,
}


def freeze(model: nn.Module, names: Iterable[str]) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model
