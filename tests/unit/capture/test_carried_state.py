"""A model that computes with what an earlier forward left in its attributes is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture.capture import capture
from tests.runs.staged_run import check_split_equals_whole

X = (torch.randn(4, 8),)


class Keeps(nn.Module):
    """Calls one of the functions below between two layers."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between
        self.calls = 0
        self.noted = {"calls": 0}
        self.total = torch.zeros(())
        self.cache: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))


class Branches(Keeps):
    """Called as a whole: its forward branches on how many values are positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if (x > 0).sum() >= 0 else x


class Loops(Keeps):
    """Exported: torch.fx cannot count its rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1] // 8):
            x = super().forward(x)
        return x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x)).relu()


def anneals(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x * 0.9**model.calls


def changes_its_way(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x if model.calls < 3 else x.relu()


def notes(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.noted["calls"] += 1
    return x / model.noted["calls"]


def averages(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.total = 0.9 * model.total + x.detach().mean()
    return x - model.total


def counts_in_a_tensor(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.total = model.total + 1
    return x / model.total


def writes_in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.total.add_(1)
    return x / model.total


def takes_the_last(model: Any, x: torch.Tensor) -> torch.Tensor:
    last, model.cache = model.cache, x.detach()
    return x if last is None else x + last


CARRIED = [
    (anneals, "calls"),
    (changes_its_way, "calls"),
    (notes, "noted"),
    (averages, "total"),
    (counts_in_a_tensor, "total"),
    (writes_in_place, "total"),
    (takes_the_last, "cache"),
]


@pytest.mark.parametrize(("kind", "how"), [(Keeps, "fx"), (Loops, "export")])
@pytest.mark.parametrize(("between", "attribute"), CARRIED)
def test_what_a_graph_would_have_as_a_constant_is_refused(
    between: Callable[[Any, torch.Tensor], torch.Tensor],
    attribute: str,
    kind: type[Keeps],
    how: str,
) -> None:
    model = kind(between)
    pattern = (
        f"{how}: a forward computes with what an earlier one left in {attribute}, .*in a buffer"
    )
    assigns = (averages, counts_in_a_tensor)
    if torch.__version__.startswith("2.9.") and kind is Loops and between in assigns:
        pattern = "export: .*The tensor attribute self.total was assigned"  # export refuses it
    with pytest.raises(ValueError, match=pattern):
        capture(model, num_stages=2, example_args=X)
    if kind is Keeps:  # the other is then called as a whole: see below
        with pytest.raises(ValueError, match=rf"left in inner\.{attribute}, "):
            capture(Around(model), num_stages=2, example_args=X)


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    model.noted["calls"] += 1
    return x


def fills_a_cache(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.cache is None:
        model.cache = torch.arange(8.0) * model.scale
    return x + model.cache


def caches_by_length(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.calls < x.shape[1]:
        model.calls, model.cache = x.shape[1], torch.arange(float(x.shape[1]))
    return x + model.cache[: x.shape[1]]


def shows(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.cache = x.softmax(-1)
    model.seen = [x, model.cache]
    return x * model.cache


def collects(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(x.detach())
    return x + model.seen[-1]


HARMLESS = [counts, fills_a_cache, caches_by_length, shows, collects]


@pytest.mark.parametrize("kind", [Keeps, Loops])
@pytest.mark.parametrize("between", HARMLESS)
def test_what_no_later_forward_computes_with_is_taken(
    between: Callable[[Any, torch.Tensor], torch.Tensor], kind: type[Keeps]
) -> None:
    check_split_equals_whole(kind(between), 2, X)


@pytest.mark.parametrize("make", [list, lambda modules: nn.Sequential(*modules)])
@pytest.mark.parametrize(("between", "attribute"), CARRIED)
def test_modules_that_are_called_as_a_whole_share_what_is_in_containers(
    make: Any, between: Callable[[Any, torch.Tensor], torch.Tensor], attribute: str
) -> None:
    model = make([nn.Linear(8, 8), Keeps(between)])
    if between in (notes, writes_in_place):
        assert len(capture(model, num_stages=2, example_args=X).layers) == 2
        return
    with pytest.raises(ValueError, match=rf"left in 1\.{attribute}, of which the stages have copi"):
        capture(model, num_stages=2, example_args=X)


@pytest.mark.parametrize(("between", "attribute"), CARRIED)
def test_where_the_forward_depends_on_values(
    between: Callable[[Any, torch.Tensor], torch.Tensor], attribute: str
) -> None:
    model = Around(Branches(between))
    if between in (notes, writes_in_place):
        assert capture(model, num_stages=2, example_args=X).how == "fx"
        return
    with pytest.raises(ValueError, match=rf"left in inner\.{attribute}, "):
        capture(model, num_stages=2, example_args=X)
