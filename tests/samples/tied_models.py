"""Models with tied weights, and the same with a Parameter of its own for every use.

The pipeline adds up the gradients of a tied parameter's stages in their order. So does stock torch
on the untied model if :func:`summing` adds up the gradients of the uses before each step: to the
same bits, where autograd on the tied model adds them in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.references.oracle import Batch
from tests.samples.models import LENGTH, VOCABULARY, WIDTH, Task

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def untied(model: Any) -> Any:
    """A copy in which every use of a tied parameter has a Parameter, which knows the first."""
    model = copy.deepcopy(model)
    seen: dict[nn.Parameter, nn.Parameter] = {}
    for module in model if isinstance(model, list) else [model]:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter in seen:
                    mine = nn.Parameter(parameter.detach().clone())
                    mine.first_use = seen[parameter]  # type: ignore[attr-defined]
                    setattr(owner, name, mine)
                else:
                    seen[parameter] = parameter
    return model


def summing(
    kind: type[torch.optim.Optimizer],
    *,
    bound: float = math.inf,
    norms: list[float] | None = None,
    **options: Any,
) -> MakeOptimizer:
    """Makes optimizers of an untied model that train it as if it were tied."""

    class Summing(kind):  # type: ignore[misc,valid-type]
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            uses: dict[nn.Parameter, list[nn.Parameter]] = {}
            for parameter in parameters:
                uses.setdefault(getattr(parameter, "first_use", parameter), []).append(parameter)
            for first, all_uses in uses.items():
                gradients = [use.grad for use in all_uses if use.grad is not None]
                if gradients:
                    first.grad = sum(gradients[1:], start=gradients[0])
            total = nn.utils.clip_grad_norm_(list(uses), bound)
            if norms is not None:
                norms.append(float(total))
            for first, all_uses in uses.items():
                for use in all_uses:
                    use.grad = None if first.grad is None else first.grad.clone()
            return super().step()

    return lambda parameters: Summing(parameters, **options)


class LanguageModel(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _tokens(rows: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1))
    return Batch((tokens[:, :-1],), tokens[:, 1:])


class Layer(nn.Module):
    """Where ``gated``, ``second`` is used for rows of a positive mean only."""

    def __init__(self, *, gated: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x).tanh()
        if self.gated and float(x.detach().mean()) <= 0:
            return x
        return x + self.second(x).sin()


def _layers() -> list[nn.Module]:
    """One weight is everybody's, one the first's and the last's, one vector the middle ones'."""
    layers = [Layer(gated=i in (0, 3)) for i in range(4)]
    for layer in layers[1:]:
        layer.first.weight = layers[0].first.weight
    layers[3].second.weight = layers[0].second.weight
    layers[2].second.bias = layers[1].second.bias
    return list(layers)


def _rows(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH))


def late_by_layer(model: nn.Module) -> dict[str, int]:
    """How late each layer's parameters are under "pipedream", one layer a stage."""
    names = [name for name, _ in model.named_parameters()]
    d = 1 + max(int(name.split(".")[0]) for name in names)
    return {name: d - 1 - int(name.split(".")[0]) for name in names}


BLOCKS = [f"blocks.{i}" for i in range(1, 6)]
TIED = {
    "language model": Task(
        LanguageModel, _tokens, next_token_loss, cuts=("embedding", *BLOCKS), exact=False
    ),
    "layers": Task(_layers, _rows, depths=(4,), exact=False),
}
