"""A loss is a number: what a float can do it can, waiting for itself."""

from __future__ import annotations

import copy
import json
import math
import numbers
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.runtime.lazy_numbers import LazyNumber

X, Y = torch.randn(8, 4), torch.randn(8, 4)


@pytest.fixture(scope="module")
def pipe() -> Iterator[pd2.PipelineModule]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=2, num_microbatches=2, example_args=(X,)
    ) as made:
        yield made


class Known(LazyNumber):
    """A number that is there."""

    def __init__(self, number: float) -> None:
        self.number = number

    def done(self) -> bool:
        return True

    def item(self) -> float:
        return self.number


NUMBERS = (0.0, -2.5, 3.0, math.inf, math.nan)
BINARY: list[Callable[[Any, Any], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, divmod),
    *(operator.mod, operator.pow, operator.iadd, operator.imul, operator.itruediv),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    lambda number, other: max([number, other]),
    lambda number, other: sum([number, other]),
    lambda number, other: math.isclose(number, other),
    lambda number, other: np.float64(number) * other,
    lambda number, other: np.mean([number, other]),
    lambda number, other: torch.full((2,), 0.5, dtype=torch.double) * number + other,
]
UNARY: list[Callable[[Any], Any]] = [
    *(operator.neg, operator.pos, abs, round, int, float, bool, str, hash, complex),
    *(math.floor, math.ceil, math.trunc, math.isnan, math.isfinite, math.exp, np.isnan, np.sqrt),
    lambda number: f"{number:.3f} {number}",
    lambda number: "%.3f %s" % (number, number),  # noqa: UP031
    lambda number: round(number, 3),
    lambda number: number.is_integer(),
    lambda number: number.real,
    lambda number: {number: 1},
    lambda number: json.dumps({"loss": number}, default=float),
    lambda number: json.dumps({"loss": [number]}),
    lambda number: np.asarray(number, dtype="f4"),
    lambda number: np.array([number, 1.0]),
]


def outcome(compute: Callable[..., Any], *values: Any) -> str:
    """What comes of it, where a number that is given back as it is shows as a float."""
    try:
        shown = repr(compute(*values))
    except Exception as error:
        shown = f"{type(error).__name__}: {error}"
    return re.sub(r"Known\(([^)]*)\)", r"\1", shown).replace("Known", "float")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("number", NUMBERS)
def test_it_computes_as_a_float(number: float) -> None:
    for alone in UNARY:
        assert outcome(alone, Known(number)) == outcome(alone, number)
    for compute in BINARY:
        for other in NUMBERS:
            wanted = outcome(compute, number, other)
            assert outcome(compute, Known(number), other) == wanted
            assert outcome(compute, number, Known(other)) == wanted
            assert outcome(compute, Known(number), Known(other)) == wanted
    assert outcome(Known(number).__add__, "text") == outcome(number.__add__, "text")
    assert isinstance(Known(number), numbers.Real)


def test_torch_takes_it_as_a_tensor() -> None:
    number: Any = Known(0.3)
    as_tensor = torch.tensor(0.3, dtype=torch.double)
    nan: Any = Known(math.nan)
    assert torch.isnan(nan)
    assert torch.equal(torch.stack([number, number]), torch.stack([as_tensor, as_tensor]))
    assert torch.tensor([number], dtype=torch.float32).tolist() == [pytest.approx(0.3)]
    total = torch.zeros(())
    total += number
    assert total == torch.tensor(0.3)
    assert (torch.ones(2) * number).dtype == torch.float32
    assert torch.equal(number.sqrt(), as_tensor.sqrt())
    assert number.tolist() == 0.3
    assert number.shape == ()
    assert number.device.type == "cpu"
    for name in ("detach", "cpu", "clone", "float", "mean"):
        assert getattr(number, name)() is number
    assert not hasattr(number, "__len__")
    assert not hasattr(number, "no_such_name")


@pytest.mark.parametrize("keep", [copy.deepcopy, pickle.dumps, lambda x: torch.save(x, BytesIO())])
def test_it_is_kept_as_a_float_alone(keep: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"give float\(\)"):
        keep({"loss": Known(0.5)})


def test_only_reading_waits(pipe: pd2.PipelineModule) -> None:
    with pipe.no_sync():
        first = pipe.train_step(X, target=Y)
    kept = first.detach().cpu()
    assert kept is first
    assert "Loss(" in repr(first)
    total = 0.0
    total += first
    assert type(total) is float
    assert total == first.item()
    assert first == total
    assert first < math.inf
    pipe.discard_batch()


def test_it_has_no_backward(pipe: pd2.PipelineModule) -> None:
    with pipe.no_sync():
        loss = pipe.train_step(X, target=Y)
    for call in (loss.backward, loss.detach().backward):
        with pytest.raises(TypeError, match=r"train_step.* the backward already"):
            call()
    with pytest.raises(TypeError, match="LossScale"):
        torch.amp.GradScaler("cpu").scale(loss)
    pipe.discard_batch()
