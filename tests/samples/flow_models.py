"""What flows through the stages beside one activation: lengths that change, structures, losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.samples.models import VOCABULARY, WIDTH, Block, Task, token_loss


class AnyLength(nn.Module):
    """Attention over sequences whose length is each batch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def any_length(lengths: Sequence[int]) -> Task:
    """Batches have these lengths in turn."""
    following = itertools.cycle(lengths)

    def draw(rows: int) -> Batch:
        size = (rows, next(following))
        return Batch((torch.randint(VOCABULARY, size),), torch.randint(VOCABULARY, size))

    return Task(AnyLength, draw, token_loss, training=False)


class Nested(nn.Module):
    """Outputs and hidden values of several stages in nested dictionaries, with None among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def forward(
        self,
        x: torch.Tensor,
        gate: torch.Tensor | None = None,
        *,
        power: int = 1,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh() ** power
            if gate is not None:
                x = x * gate
            hidden.append(x)
        if options is not None and options["deep"]:
            x = x + hidden[0]
        return {"early": hidden[1], "late": {"x": x, "none": None, "power": power}}


def nested_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    late = output["late"]
    assert late["none"] is None
    early_loss = F.mse_loss(output["early"], target)
    return 0.3 * early_loss + 0.7 * F.l1_loss(late["x"], target * late["power"])


def nested(*, gated: bool, **kwargs: Any) -> Task:
    def draw(rows: int) -> Batch:
        gate = torch.rand(rows, 1) if gated else None
        return Batch((torch.randn(rows, WIDTH), gate), torch.randn(rows, WIDTH), kwargs)

    return Task(Nested, draw, nested_loss)


Raise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Mixture(nn.Module):
    """Three experts with a loss that balances them, given to ``raise_loss``."""

    def __init__(self, raise_loss: Raise, *, opaque: bool) -> None:
        super().__init__()
        self.raise_loss = raise_loss
        self.opaque = opaque
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        if self.opaque and gates.sum() < 0:  # which torch.fx cannot trace
            raise ValueError("a softmax is negative")
        mixed = torch.stack([expert(x) for expert in self.experts], -1) * gates.unsqueeze(-2)
        balance = 0.5 * gates.mean(0).square().sum()
        return self.raise_loss(mixed.sum(-1).tanh(), balance)


class Mixtures(nn.Module):
    def __init__(self, make_mixture: Callable[[], Mixture]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList([make_mixture() for _ in range(4)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for mixture in self.mixtures:
            x = mixture(x)
        return self.last(x)


def random_batch(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH))


def raising(*, opaque: bool = False) -> Task:
    """Losses raised where they arise."""
    return Task(lambda: Mixtures(lambda: Mixture(pd2.add_loss, opaque=opaque)), random_batch)


def adding(reduction: str = "mean") -> Task:
    """The same model, for the oracle: the losses are kept aside and added by the loss function."""
    aside: list[torch.Tensor] = []

    def keep(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        aside.append(value)
        return x

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target, reduction=reduction)
        for value in aside:
            loss = loss + value
        aside.clear()
        return loss

    return Task(lambda: Mixtures(lambda: Mixture(keep, opaque=False)), random_batch, loss_fn)


class Carrying(nn.Module):
    """The same, where each mixture hands the sum of the losses on beside the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList([_Handing() for _ in range(4)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        added = x.new_zeros(())
        for mixture in self.mixtures:
            x, added = mixture(x, added)
        return self.last(x), added


class _Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.gate(x).softmax(-1)
        return self.expert(x).tanh() * gates[:, :1], added + gates.mean(0).square().sum()


def carried_loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    x, added = output
    return F.mse_loss(x, target) + 0.5 * added


CARRYING = Task(Carrying, random_batch, carried_loss)
