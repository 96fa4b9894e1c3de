"""Numbers that a forward draws or reads in Python are never frozen into a program."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.capture.capture import capture

X = torch.randn(6, 8)
PYTHONS, NUMPYS, OLD = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)
TORCHS = torch.Generator()

DRAWS: dict[str, Callable[[nn.Module], float]] = {
    "random": lambda module: random.random(),
    "numpy.random": lambda module: np.random.rand(),
    "PYTHONS": lambda module: PYTHONS.gauss(0, 1),
    "NUMPYS": lambda module: NUMPYS.normal(),
    "OLD": lambda module: OLD.rand(),
    "TORCHS": lambda module: float(torch.rand((), generator=TORCHS)),
    "own": lambda module: module.own.random(),  # type: ignore[operator, union-attr]
    "listed": lambda module: module.listed[0].random(),  # type: ignore[operator, union-attr, index]
    "numpy.random.default_rng": lambda module: np.random.default_rng().random(),
    "time.time": lambda module: time.time() % 1,
    "time.perf_counter": lambda module: now() % 1,
    "os.urandom": lambda module: os.urandom(1)[0] / 256,
}
GENERATORS = [name for name in DRAWS if not name.startswith(("time", "os", "numpy.random.d"))]
EFFECTS = ["a factor", "a branch"]


class Draws(nn.Module):
    def __init__(self, source: str, effect: str) -> None:
        super().__init__()
        self.draw, self.effect = DRAWS[source], effect
        self.own, self.listed = random.Random(4), [np.random.default_rng(5)]
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = self.draw(self)
        if self.effect == "a factor":
            return self.last(self.first(x) * drawn)
        return self.last(self.first(x) if drawn > -9 else x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


def states(model: Any) -> list[Any]:
    return [
        random.getstate(),
        str(np.random.get_state(legacy=False)),
        PYTHONS.getstate(),
        str(NUMPYS.bit_generator.state),
        str(OLD.get_state(legacy=False)),
        TORCHS.get_state().tolist(),
        model.own.getstate(),
        str(model.listed[0].bit_generator.state),
    ]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("source", DRAWS)
def test_a_root_that_draws_is_refused_by_the_source(source: str, effect: str) -> None:
    model = Draws(source, effect)
    before = states(model)
    with pytest.raises(
        ValueError, match=r"Move what else the reasons name .* module inside"
    ) as raised:
        capture(model, num_stages=2, example_args=(X,))
    _, fx, *_ = str(raised.value).splitlines()
    assert "RandomnessError: " in fx
    assert source in fx
    assert states(model) == before


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("source", GENERATORS)
def test_a_module_that_draws_is_called_as_it_is(source: str, effect: str) -> None:
    model = Around(Draws(source, effect))
    before = states(model.inner)
    captured = capture(model, num_stages=2, example_args=(X,))
    assert "inner" in [layer.name for layer in captured.layers]
    assert states(model.inner) == before


@pytest.mark.parametrize("source", sorted(set(DRAWS) - set(GENERATORS)))
def test_a_module_that_reads_what_differs_each_time_is_not_frozen(source: str) -> None:
    captured = capture(Around(Draws(source, "a branch")), num_stages=2, example_args=(X,))
    assert "inner" in [layer.name for layer in captured.layers]
    with pytest.raises(ValueError, match=rf"export: RandomnessError: {source}"):
        capture(Around(Draws(source, "a factor")), num_stages=2, example_args=(X,))


def test_a_seeded_generator_of_each_call_is_a_constant() -> None:
    class Seeded(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(x * float(np.random.default_rng(3).random()))

    assert capture(Seeded(nn.Identity()), num_stages=1, example_args=(X,)).how == "fx"


def test_each_microbatch_draws_a_number_of_its_own() -> None:
    drawn: list[float] = []

    class Notes(Draws):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn.append(self.own.random())
            return self.last(self.first(x)) * drawn[-1]

    model = Around(Notes("own", ""))
    with pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=2, num_microbatches=4, example_args=(X,)
    ) as pipe:
        drawn.clear()
        pipe.train_step(torch.randn(8, 8), target=torch.randn(8, 8))
        pipe.flush()
    expected = random.Random(4)
    assert drawn == [expected.random() for _ in range(4)]
