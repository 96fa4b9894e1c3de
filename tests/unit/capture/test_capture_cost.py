"""Costs come from shapes alone: deterministic, without computing anything or touching the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture import captured as captured_module
from pipedream2bw.capture.arguments import CallSignature
from pipedream2bw.capture.capture import capture, chained
from pipedream2bw.capture.captured import Captured, Draft
from pipedream2bw.capture.dry_run import Findings, dry_run
from pipedream2bw.stages.boundaries import choose_boundaries, values_between


def costs_of(model: nn.Module, *example: torch.Tensor, num_stages: int = 1) -> Captured:
    return capture(model, num_stages=num_stages, example_args=example)


def test_twice_the_work_costs_twice() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1024, bias=False))
    small, large = costs_of(model, torch.randn(256, 512)).layers
    assert large.forward_cost / small.forward_cost == pytest.approx(2, rel=0.05)
    seconds = 2 * 256 * 512 * 512 / 50e9
    assert seconds < small.forward_cost < 1.3 * seconds


def test_the_backward_of_a_layer_with_and_without_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    frozen, first, inner = costs_of(model, torch.randn(256, 512)).layers
    assert frozen.backward_cost == 0
    assert first.backward_cost == pytest.approx(first.forward_cost, rel=0.4)
    assert inner.backward_cost == pytest.approx(2 * inner.forward_cost, rel=0.4)


def test_parameter_bytes() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    signature = CallSignature(model.forward, (torch.randn(4, 3),), {})
    draft = Draft(model, "sequential", chained(model, signature), signature)
    assert draft.parameter_bytes == [("0", 80), ("1", 0), ("2", 40)]


def test_edges_carry_the_bytes_of_their_values() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(y) + y + late

    captured = costs_of(Skip(), torch.randn(10, 8), torch.randn(10, 4, dtype=torch.float64))
    assert [layer.name for layer in captured.layers] == ["a", "b", "add", "add_1"]
    # x goes to layer 0 only; late, an input, counts as produced there.
    sizes = captured.costs.value_bytes
    edges = [(a, b, sizes[name]) for a, b, name in values_between(captured.layer_nodes)]
    assert sorted(edges) == [
        (0, 1, 160),
        (0, 2, 160),
        (0, 3, 320),
        (1, 2, 160),
        (2, 3, 160),
    ]


def test_the_same_costs_every_time_and_nothing_is_touched() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.LazyLinear(4)
    )
    x = torch.randn(4, 3, 6, 6)
    model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [value._version for value in model.state_dict().values()]
    state = torch.get_rng_state()
    first, second = (costs_of(model, x) for _ in range(2))
    assert first.layers == second.layers
    assert torch.equal(torch.get_rng_state(), state)
    for (name, value), version in zip(model.state_dict().items(), versions, strict=True):
        assert torch.equal(value, before[name])
        assert value._version == version
    assert all(layer.forward_cost > 0 for layer in first.layers)


def test_costs_of_a_model_too_large_for_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(3)))
        example = torch.empty(1024, 100_000)
    layers = costs_of(model, example).layers
    assert all(layer.forward_cost > 100 for layer in layers)


def test_a_layer_that_cannot_be_counted_costs_in_proportion_to_its_parameters() -> None:
    class Routed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(8, width)
            self.back = nn.Linear(width, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = torch.nonzero(x.sum(-1) > 0)[:, 0]
            y = x.clone()
            if chosen.numel() > 0:
                y[chosen] = self.back(self.linear(x[chosen]))
            return y

    captured = costs_of(nn.Sequential(Routed(1000), Routed(3000)), torch.randn(64, 8))
    small, large = captured.layers
    assert large.forward_cost / small.forward_cost == pytest.approx(3, rel=0.2)
    assert captured.found.error is None


def test_a_graph_that_cannot_be_balanced_has_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding them runs the model on fake tensors: a large one would be run twice."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.mean(0).shape[0] != 8:  # torch.fx calls this module as a whole
                raise ValueError
            return self.second(self.first(x).relu())

    num_runs = 0

    def counted(*args: Any, **kwargs: Any) -> Findings:
        nonlocal num_runs
        num_runs += 1
        return dry_run(*args, **kwargs)

    monkeypatch.setattr(captured_module, "dry_run", counted)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Branching(), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)) * scale

    captured = costs_of(Whole(), torch.randn(4, 8), torch.randn(4, 1), num_stages=2)
    assert captured.how == "export"
    assert num_runs == 1


@pytest.mark.parametrize("num_stages", [2, 3])
def test_no_costs_are_counted_where_there_is_one_way_to_cut(num_stages: int) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    x = torch.randn(4, 8)
    for model in (layers, nn.Sequential(*layers)):
        captured = capture(model, num_stages=num_stages, example_args=(x,), balances=True)
        assert (captured.found.costs is None) == (num_stages == 3)
        assert len(choose_boundaries(captured, num_stages)) == num_stages
        assert capture(model, num_stages=num_stages, example_args=(x,)).found.costs is not None
