"""Tied weights on several stages, in threads: trained as one Parameter, copies equal to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
)
from tests.samples.models import whole
from tests.samples.stubborn_schedule import STUBBORN
from tests.samples.tied_models import TIED, Layer, late_by_layer, summing, untied

SGD = {"lr": 0.1, "momentum": 0.5}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **SGD)


def gentle(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With large steps training blows up what rounding has left."""
    return torch.optim.SGD(parameters, lr=0.03)


def assert_copies_equal(pipe: pd2.PipelineModule) -> None:
    """Every stage's copy of a tied parameter has memory of its own and the same bits."""
    pipe.flush()
    copies: dict[str, list[torch.Tensor]] = {}
    for stage in pipe.session.stages:
        for name in stage.weights.trainable:
            copies.setdefault(name, []).append(stage.weights.shown(name))
    several = {name: those for name, those in copies.items() if len(those) > 1}
    assert several
    for name, (first, *others) in several.items():
        for other in others:
            assert other.data_ptr() != first.data_ptr()
            assert torch.equal(other, first), name


@pytest.mark.parametrize(
    ("name", "schedule", "d", "m", "v"),
    [
        ("language model", "2bw", 2, 2, 1),
        ("language model", "2bw", 4, 5, 1),
        ("language model", "2bw_eager", 3, 5, 1),
        ("language model", "2bw_split", 3, 4, 1),
        ("language model", "interleaved_2bw", 4, 4, 2),
        ("language model", "1f1b", 3, 4, 1),
        ("language model", "gpipe", 2, 3, 1),
        ("language model", "interleaved", 4, 2, 2),
        ("language model", "zero_bubble", 4, 4, 1),
        ("language model", "chimera", 2, 4, 1),
        ("layers", "2bw", 4, 4, 1),
        ("layers", "interleaved_2bw", 4, 4, 2),
        ("layers", "1f1b", 4, 3, 1),
        ("layers", "zero_bubble", 4, 4, 1),
        ("layers", "pipedream", 4, 1, 1),
        ("layers", "chimera", 4, 4, 1),
    ],
)
@pytest.mark.parametrize("bound", [None, 0.3])
def test_gradients_are_added_in_the_order_of_the_stages(
    name: str, schedule: str, d: int, m: int, v: int, bound: float | None
) -> None:
    task = TIED[name]
    batches = task.batches([2 * m] * 8)
    expected_norms: list[float] = []
    make = summing(torch.optim.SGD, norms=expected_norms, bound=bound or math.inf, **SGD)
    model = whole(untied(task.model()))
    delay_of = late_by_layer(model) if schedule == "pipedream" else None
    want = by_oracle(task, batches, m, make, model=model, schedule=schedule, delay_of=delay_of)
    norms: list[Any] = []
    with make_pipeline(task, d, m, batches[0], schedule=schedule, stages_per_rank=v) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=bound)
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            norms += [opt.grad_norm] if bound else []
        assert_copies_equal(pipe)
        state = copy_of(pipe.state_dict())
    assert_same(Trajectory([float(loss) for loss in losses], state), want)
    if bound:
        assert [float(norm) for norm in norms] == expected_norms
        assert max(expected_norms) > bound


@pytest.mark.parametrize("split", ["auto", ["blocks.0.1"], ["blocks.2.2"], ["head"]])
def test_the_tied_model_trains_as_autograd_trains_it(split: Any) -> None:
    check_task(TIED["language model"], 2, 3, rows=[6, 7, 9, 6], split=split)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_share_weights_with_all_others(schedule: str, recompute: bool) -> None:
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
    check_task(TIED["layers"], 4, 4, [8] * 5, gentle, **options)


def test_an_automatic_split_is_not_bound_by_ties() -> None:
    task = TIED["language model"]
    with make_pipeline(task, 4, 4, task.batches([4])[0], split="auto") as pipe:
        stages = [program.parameters for program in pipe.session.modes.first.programs]
    assert "embedding.weight" in stages[0]
    assert "embedding.weight" in stages[3]
    assert all(any(name.startswith("blocks") for name in names) for names in stages[:3])


class ByWhole(torch.optim.Optimizer):
    """Its step depends on all parameters that it is given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = sum(float(p.grad.norm()) for p in given)
            group["calls"] = group.get("calls", 0) + 1
            for parameter in given:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad, alpha=1 / (norm + 1e-3))
                parameter.sub_(group["lr"] * momentum)


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "SGD": gentle,
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "ByWhole": ByWhole,
}


@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "chimera"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_copies_are_bitwise_equal_after_100_batches(make: Any, schedule: str) -> None:
    task, m = TIED["layers"], 1 if schedule == "pipedream" else 4
    batches = task.batches([2 * m] * 100)
    with make_pipeline(task, 4, m, batches[0], schedule=schedule) as pipe:
        assert_copies_equal(pipe)
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        assert_copies_equal(pipe)
        before = copy_of(whole(task.model()).state_dict())
        assert all(not torch.equal(value, before[n]) for n, value in pipe.state_dict().items())


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["RMSprop"]])
def test_a_copy_steps_as_the_unsplit_models_parameter(make: Any) -> None:
    check_task(TIED["layers"], 4, 4, [8] * 6, make, exact=False)


@pytest.mark.parametrize("schedule", ["2bw", "interleaved_2bw", "chimera"])
@pytest.mark.parametrize("bound", [None, 0.1])
def test_steps_may_come_after_a_drain(schedule: str, bound: float | None) -> None:
    """Stages of one rank wait for each other's updates, which none of them may hold up."""
    task = TIED["language model"]
    batches = task.batches([8] * 5)
    v = 2 if "interleaved" in schedule else 1
    states = []
    for drains in (False, True):
        with make_pipeline(task, 4, 4, batches[0], schedule=schedule, stages_per_rank=v) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=bound)
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                if drains:
                    pipe.flush()
                opt.step()
            assert_copies_equal(pipe)
            states.append(copy_of(pipe.state_dict()))
    assert_same_state(*states)


def test_named_counted_and_saved_once() -> None:
    task = TIED["language model"]
    batch = task.batches([4])[0]
    model = task.model()
    names = [name for name, _ in model.named_parameters()]
    number = sum(parameter.numel() for parameter in model.parameters())
    tied = model.embedding.weight.numel()
    with make_pipeline(task, 2, 2, batch, model=model) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert pipe.state_dict().keys() == model.state_dict().keys()
        states = [stage.weights for stage in pipe.session.stages]
        assert sum(state.num_elements for state in states) == number
        assert f"+ {tied} of earlier stages" in repr(pipe)
        reports = pipe.memory_report().values()  # bytes are what is there
        assert sum(report.gradients for report in reports) == 4 * (number + tied)
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01))
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
        assert len(opt.state_dict()["state"]) == len(names)
        back = pipe.unsplit()
    assert isinstance(back, nn.Module)
    assert back.head.weight is back.embedding.weight
    assert back.head.weight.grad is None


@pytest.mark.parametrize("schedule", ["2bw", "chimera"])
@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["RMSprop"]])
def test_a_checkpoint_goes_to_all_copies(schedule: str, make: Any) -> None:
    task = TIED["language model"]
    batches = task.batches([8] * 6)

    saved: list[Any] = []

    def save(number: int, trained: Any, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            saved[:] = [copy_of(trained.state_dict()), copy.deepcopy(optimizer.state_dict())]
            trained.load_state_dict(saved[0])  # the delay starts anew

    def load(number: int, trained: Any, optimizer: torch.optim.Optimizer) -> None:
        if number == 0:
            trained.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            assert_copies_equal(trained)

    want = by_pipeline(task, batches, 4, 4, make, save, schedule=schedule)
    other = task.model(seed=9)
    got = by_pipeline(task, batches[3:], 4, 4, make, load, schedule=schedule, model=other)
    assert_same_state(got.state, want.state)
    assert got.losses == want.losses[3:]


def test_copies_stay_equal_where_loading_fails() -> None:
    task = TIED["language model"]
    batch = task.batches([8])[0]
    loaded = copy_of(task.model(seed=9).state_dict())
    last = list(loaded)[-1]
    loaded[last] = torch.zeros(1, 1, 1)
    for schedule in ("2bw", "chimera"):
        with make_pipeline(task, 4, 4, batch, schedule=schedule) as pipe:
            with pytest.raises(RuntimeError, match="size mismatch"):
                pipe.load_state_dict(loaded)
            assert_copies_equal(pipe)


def test_evaluation_reads_the_newest_copies() -> None:
    task = TIED["language model"]
    batches = task.batches([6] * 3)
    with make_pipeline(task, 3, 3, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pipe.eval()
        outputs = pipe(*batches[0].args)
        model = task.model()
        model.load_state_dict(pipe.state_dict())
        assert torch.equal(outputs, torch.cat([model(x) for x in batches[0].args[0].split(2)]))
        pipe.train()
        pipe.train_step(*batches[0].args, target=batches[0].target)
        opt.step()


def test_a_frozen_tied_parameter_may_be_on_several_stages() -> None:
    task = TIED["language model"]
    batches = task.batches([6] * 4)

    def frozen() -> Any:
        model = task.model()
        model.embedding.weight.requires_grad_(False)
        return model

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd(p for p in parameters if p.requires_grad)

    want = by_oracle(task, batches, 3, make, model=frozen())
    got = by_pipeline(task, batches, 3, 3, make, model=frozen())
    assert_same(got, want)
    with make_pipeline(task, 3, 3, batches[0], model=frozen()) as pipe:
        reports = pipe.memory_report().values()
        assert sum(report.frozen_weights for report in reports) == frozen().embedding.weight.nbytes


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_two_parameters_over_one_memory_are_refused(turned: bool, requires_grad: bool) -> None:
    task = TIED["language model"]
    model = task.model()
    alias = model.embedding.weight.data
    model.head.weight = nn.Parameter(alias.t() if turned else alias, requires_grad)
    for precision in (None, "bf16"):
        with pytest.raises(
            ValueError,
            match=rf"embedding.weight and head.weight are two.*True and {requires_grad}",
        ):
            make_pipeline(task, 2, 2, task.batches([4])[0], model=model, precision=precision)


def test_a_schedule_in_which_tied_stages_would_deadlock_is_refused() -> None:
    schedule = pd2.load_schedule(STUBBORN)
    task = TIED["language model"]
    batches = task.batches([2] * 3)
    with pytest.raises(ValueError, match=r"(?s)embedding.weight \(stages 0, 2\).*waits in 2F"):
        make_pipeline(task, 3, 1, batches[0], schedule=schedule)

    # Stages 1 and 2 alone may wait for each other.
    def layers() -> list[nn.Module]:
        torch.manual_seed(1)
        made = [Layer(), Layer(), Layer()]
        made[2].first.weight = made[1].first.weight
        return list(made)

    rows = TIED["layers"].batches([2] * 3)
    with make_pipeline(TIED["layers"], 3, 1, rows[0], schedule=schedule, model=layers()) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in rows:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        assert_copies_equal(pipe)


def test_a_failing_pipeline_ends_waiting_for_other_copies() -> None:
    task = TIED["language model"]
    batch = task.batches([4])[0]
    pipe = make_pipeline(task, 2, 2, batch)
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    pipe.train_step(*batch.args, target=batch.target)
    opt.step()
    pipe.close()  # stage 1 waits for stage 0's gradient, which needs the next batch
    with pytest.raises(RuntimeError, match="closed"):
        pipe.flush()
