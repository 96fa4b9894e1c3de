"""A graph serves if it calls what the model calls: where symbolic tracing takes another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipedream2bw.capture import search
from pipedream2bw.capture.operator_calls import OperatorCalls, Recorded
from tests.runs.staged_run import check_split_equals_whole, cut

X = (torch.randn(5, 8),)


class Pair:
    """What a model returns, with attributes that its caller may set."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.first, pair.second], None), lambda leaves, _: Pair(*leaves)
)


class Whole(nn.Module):
    """Called as a whole: its forward branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.linear(x), x if x.shape[0] > 0 else None)


class Depends(nn.Module):
    """Called as a whole, and no fake tensor can tell what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x.neg()


class Model(nn.Module):
    def __init__(self, call: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.whole = nn.Linear(8, 8), nn.Linear(8, 8), Whole()
        self.depends = Depends()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, self.first(x))


def sets_an_attribute(model: Any, x: torch.Tensor) -> Any:
    pair = model.whole(x)
    pair.second = model.last(pair.first)
    return pair


def asks_for_the_type(model: Any, x: torch.Tensor) -> Any:
    return model.last(x * 2 if isinstance(x, torch.Tensor) else x)


def leaves_a_layer_out(model: Any, x: torch.Tensor) -> Any:
    return x if torch.is_tensor(x) else model.last(x)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (sets_an_attribute, "it returns other values"),
        (asks_for_the_type, "the model calls no aten.addmm.default on these values"),
        (leaves_a_layer_out, "the model calls no aten.t.default on these values"),
    ],
)
def test_a_graph_that_is_another_program_does_not_serve(
    call: Callable[[Any, torch.Tensor], Any], reason: str
) -> None:
    captured, _ = check_split_equals_whole(Model(call), 1, X)
    assert captured.how == "export"
    (note,) = (note for note in captured.notes if note.startswith("fx: "))
    assert note.startswith(f"fx: the graph is another program than the model: {reason}")


def test_a_model_of_which_all_graphs_are_other_programs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(search, "export", refuse)
    monkeypatch.setattr(search, "read_bytecode", refuse)
    with pytest.raises(ValueError, match="fx: the graph is another program than the model"):
        cut(Model(asks_for_the_type), 1, X)


def asks_behind_values(model: Any, x: torch.Tensor) -> Any:
    return asks_for_the_type(model, model.depends(x))


def asks_for_values(model: Any, x: torch.Tensor) -> Any:
    return model.last(x - x.min() if torch.is_tensor(x) and x.min() < 0 else x)


@pytest.mark.parametrize("call", [asks_behind_values, asks_for_values])
def test_where_the_way_depends_on_values_the_model_computes_for_the_comparison(
    call: Callable[[Any, torch.Tensor], Any],
) -> None:
    model = Model(call)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="fx: the graph is another program than the model"):
        cut(model, 1, X)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_layers_whose_way_depends_on_values_are_the_models_own() -> None:
    def depends(model: Any, x: torch.Tensor) -> Any:
        return model.last(model.depends(x))

    check_split_equals_whole(Model(depends), 2, X, how="fx")


def test_what_does_not_depend_on_the_model_may_be_computed_before() -> None:
    def with_constants(model: Any, x: torch.Tensor) -> Any:
        mask = torch.ones(8, 8).tril_() * torch.arange(8)
        return model.last(x @ mask) + model.whole(x).first

    check_split_equals_whole(Model(with_constants), 2, X, how="fx")


def fills_rows(model: Any, x: torch.Tensor) -> Any:
    filled = torch.zeros(2, 8)
    filled[:1].copy_(x[:1])
    return model.last(x + filled[0])


def fills_rows_behind_values(model: Any, x: torch.Tensor) -> Any:
    return fills_rows(model, model.depends(x))


@pytest.mark.parametrize("call", [fills_rows, fills_rows_behind_values])
def test_nothing_may_be_written_to_what_was_computed_before(
    call: Callable[[Any, torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(search, "export")
    monkeypatch.delattr(search, "read_bytecode")
    with pytest.raises(
        ValueError, match=r"fx: .*: it writes in place to a tensor that was made wh"
    ):
        cut(Model(call), 1, X)


def calls_of(run: Callable[..., Any], *tensors: torch.Tensor) -> OperatorCalls:
    """Those of a function on plain tensors, as fake ones are run."""
    calls = OperatorCalls()
    calls.begin(nn.Module(), tensors)
    with Recorded(calls):
        calls.end([run(*tensors)])
    return calls


def test_calls_are_told_apart_by_what_they_depend_on() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)

    def difference(one: Callable[..., Any], other: Callable[..., Any]) -> str | None:
        models = calls_of(other, a.clone(), b.clone())
        return calls_of(one, a.clone(), b.clone()).difference(models)

    assert difference(lambda a, b: a * 2 + b, lambda a, b: b + a * 2) is not None
    assert difference(lambda a, b: a.exp() + b.sin(), lambda a, b: _swapped(a, b)) is None
    assert difference(lambda a, b: a.add_(b).mul_(2), lambda a, b: a.mul_(2).add_(b)) is not None
    assert difference(lambda a, b: a[0] + b[0], lambda a, b: a[0] + b[1]) is not None
    assert difference(lambda a, b: a * 0.5, lambda a, b: a * 0.25) is not None
    assert difference(lambda a, b: a * 0.5, lambda a, b: (a * 0.5, b.exp())[0]) is not None
    assert difference(lambda a, b: torch.rand(2) + a, lambda a, b: torch.zeros(2) + a) is not None
    assert difference(lambda a, b: (a[0], a[1])[0], lambda a, b: (a[0], a[1])[1]) is not None
    twice = difference(lambda a, b: _dropped(a) + _dropped(a), lambda a, b: 2 * _dropped(a))
    assert twice is not None


def _swapped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sine = b.sin()
    return a.exp() + sine


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x * 0.5)
