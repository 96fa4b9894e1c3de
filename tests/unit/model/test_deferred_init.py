"""deferred_init() gives, without memory, the model that the call alone would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.model import tape
from pipedream2bw.model.materialize import materialize
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, make_pipeline
from tests.samples.large_models import deferred, layers, loadable
from tests.samples.models import TASKS, WIDTH, Task, whole
from tests.samples.parameter_kinds import KINDS

EVERYTHING = Task(layers, TASKS["mlp"].draw)


def full(build: Callable[[], Any], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return whole(build())


def made(build: Callable[[], Any], seed: int = 1) -> nn.Module:
    model = whole(deferred(build, seed))
    state = torch.get_rng_state()
    names = {name for name, _ in model.named_parameters()}
    assert materialize(model, names) == set()
    assert torch.equal(torch.get_rng_state(), state)
    return model


def assert_same_tensors(got: nn.Module, want: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (got, want))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
            assert ours[name].stride() == value.stride(), name
            assert ours[name].dtype == value.dtype, name
            assert ours[name].requires_grad == value.requires_grad, name
            for other in theirs:  # tied ones are
                assert (ours[name] is ours[other]) == (value is theirs[other])


@pytest.mark.parametrize("name", [name for name in TASKS | KINDS if name != "was lazy"])
def test_parameters_are_those_of_the_whole_construction(name: str) -> None:
    build = (TASKS | KINDS)[name].build
    want = full(build)
    after = torch.get_rng_state()
    got = made(build)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_tensors(got, want)


@pytest.mark.parametrize("seed", range(3))
def test_any_initialisation_is_repeated(seed: int) -> None:
    want, got = full(layers, seed), made(layers, seed)
    assert_same_tensors(got, want)
    assert torch.equal(got[0].phases, want[0].phases)
    assert got[1].scales == want[1].scales
    assert got[1].picked == want[1].picked
    assert got[2].scale.note == "kept"


def test_only_what_is_asked_for_is_made() -> None:
    model, want = deferred(layers), full(layers)
    assert all(parameter.is_meta for parameter in model.parameters())
    names = [name for name, _ in model.named_parameters()][::2]
    materialize(model, names)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name not in names)
        if name in names:
            assert torch.equal(parameter, want.get_parameter(name))


def test_a_tensor_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one intermediate tensor lives beside what is wanted."""
    size = 1000

    def build() -> nn.Module:
        model = nn.Module()
        for i in range(6):
            model.register_parameter(str(i), nn.Parameter(torch.randn(size) * 2 + 1))
        return model

    most = 0
    run = tape._Step.run

    def counted(step: Any, storages: dict[int, Any]) -> None:
        nonlocal most
        run(step, storages)
        most = max(most, sum(s.nbytes() for s in storages.values()) // (4 * size))

    monkeypatch.setattr(tape._Step, "run", counted)
    model = deferred(build)
    materialize(model, ["3", "5"])
    assert most == 3


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_it_trains_as_the_whole_model_does(num_stages: int) -> None:
    batches = EVERYTHING.batches([8] * 4)
    want = by_oracle(EVERYTHING, batches, 4)
    got = by_pipeline(EVERYTHING, batches, num_stages, 4, model=deferred(layers))
    assert_same(got, want)


@pytest.mark.parametrize("schedule", ["chimera", "interleaved_2bw", "zero_bubble"])
def test_under_other_schedules(schedule: str) -> None:
    options = {"stages_per_rank": 2} if "interleaved" in schedule else {}
    task = TASKS["mlp"]
    batches = task.batches([8] * 3)
    want = by_oracle(task, batches, 4, schedule=schedule)
    got = by_pipeline(task, batches, 4, 4, model=deferred(task.build), schedule=schedule, **options)
    assert_same(got, want)


def test_other_models_are_captured_and_trained_too() -> None:
    """Traced and exported ones, of which the capture reads no parameter."""
    for name in ("gpt", "skips", "lstm", "batch norm"):
        task = TASKS[name]
        batches = task.batches([6] * 3)
        model = deferred(task.build)
        model.train(task.training)
        got = by_pipeline(task, batches, 2, 3, model=model)
        assert_same(got, by_oracle(task, batches, 3), exact=task.exact)


def test_both_modes_and_the_whole_model_given_back() -> None:
    task = TASKS["batch norm"]
    batch = task.batches([8])[0]
    want = full(task.build).eval()(*batch.args)
    pipe = make_pipeline(task, 2, 2, batch, model=deferred(task.build))
    pipe.eval()
    with torch.no_grad():
        assert torch.equal(pipe(*batch.args), want)
    assert_same_tensors(pipe.unsplit(), full(task.build))  # type: ignore[arg-type]


def test_a_cast_afterwards_is_that_of_the_values() -> None:
    model = deferred(loadable).to(torch.float64)
    materialize(model, {name for name, _ in model.named_parameters()})
    assert_same_tensors(model, full(loadable).to(torch.float64))


def attempt(model: nn.Module) -> None:
    batch = TASKS["mlp"].batches([4])[0]
    make_pipeline(TASKS["mlp"], 2, 2, batch, model=model).close()


def test_what_the_record_cannot_know_is_refused() -> None:
    model = deferred(loadable)
    nn.init.zeros_(model[4].weight)
    with pytest.raises(ValueError, match=r"parameter 4\.weight: 1 writes since .* must be none"):
        attempt(model)
    model = deferred(loadable)
    model[0].scale.data = torch.empty(1, device="meta")
    with pytest.raises(ValueError, match=r"0\.scale: shape \(1,\), \(8,\) when"):
        attempt(model)
    outside = torch.zeros(3)
    for build, kind, text in (
        (lambda: outside.add_(1), ValueError, "writes to a tensor of shape"),
        (lambda: 3, TypeError, "build gave int"),
        (lambda: nn.Linear(2, 2, device="meta"), ValueError, "made on meta, it must be on cpu"),
        (hooked, ValueError, "has hooks on its gradient"),
    ):
        with pytest.raises(kind, match=text):
            pd2.deferred_init(build)
    assert torch.equal(outside, torch.zeros(3))


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient)
    return model


class Holding:
    """Where no module attribute leads to."""

    def __init__(self, kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.value = kind(torch.randn(WIDTH))


class Hiding(nn.Module):
    def __init__(self, kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hidden = Holding(kind)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.linear(x) * self.hidden.value)


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.exp])
def test_a_tensor_that_no_module_holds_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"of shape .* without values would be a constant"):
        attempt(deferred(lambda: Hiding(kind)))
