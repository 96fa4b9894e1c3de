"""Clipped gradients are those of the unsplit model, to the bit, and nobody drains for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    copy_of,
    make_pipeline,
)
from tests.samples.models import TASKS
from tests.samples.stubborn_schedule import STUBBORN

Clip = Callable[[list[nn.Parameter]], Any]
NUM_BATCHES = 6


def clipped_by_torch(clip: Clip, norms: list[float]) -> Callable[..., torch.optim.Optimizer]:
    """Makes an SGD that clips the gradients of its parameters before each step."""

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = clip([p for group in self.param_groups for p in group["params"]])
            if result is not None:
                norms.append(float(result))
            return super().step()

    return lambda parameters: Clipped(parameters, lr=0.3, momentum=0.5)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def train(
    task_name: str,
    batches: list[Batch],
    num_stages: int,
    m: int,
    options: dict[str, Any],
    make: Callable[..., torch.optim.Optimizer] = sgd,
    **pipeline_options: Any,
) -> tuple[Trajectory, list[float]]:
    task = TASKS[task_name]
    pipe = make_pipeline(task, num_stages, m, batches[0], **pipeline_options)
    with pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **options)
        losses, norms = [], []
        for number, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target, **batch.kwargs))
            if (number + 1) % pipeline_options.get("accumulate", 1) == 0:
                opt.step()
                if "max_grad_norm" in options:
                    norms.append(opt.grad_norm)
        state = copy_of(pipe.state_dict())
        return Trajectory([float(loss) for loss in losses], state), [float(n) for n in norms]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "m", "v"),
    [
        ("2bw", 1, 2, 1),
        ("2bw", 2, 2, 1),
        ("2bw", 4, 5, 1),
        ("2bw_eager", 3, 5, 1),
        ("2bw_split", 3, 4, 1),
        ("interleaved_2bw", 4, 4, 2),
        ("1f1b", 3, 4, 1),
        ("interleaved", 4, 2, 2),
        ("zero_bubble", 2, 4, 1),
        ("gpipe", 2, 3, 1),
    ],
)
def test_the_norm_is_torchs_to_the_bit(
    schedule: str, num_stages: int, m: int, v: int, norm_type: float
) -> None:
    task = TASKS["skips"]
    batches = task.batches([2 * m] * NUM_BATCHES)
    unclipped: list[float] = []
    measure = clipped_by_torch(
        lambda ps: nn.utils.clip_grad_norm_(ps, math.inf, norm_type), unclipped
    )
    by_oracle(task, batches, m, measure, schedule=schedule)
    bound = sorted(unclipped)[NUM_BATCHES // 2]  # clips some batches and leaves others
    expected_norms: list[float] = []
    make = clipped_by_torch(
        lambda ps: nn.utils.clip_grad_norm_(ps, bound, norm_type), expected_norms
    )
    want = by_oracle(task, batches, m, make, schedule=schedule)
    assert min(expected_norms) < bound < max(expected_norms)
    got, norms = train(
        "skips",
        batches,
        num_stages,
        m,
        {"max_grad_norm": bound, "norm_type": norm_type},
        schedule=schedule,
        stages_per_rank=v,
    )
    assert norms == expected_norms
    assert_same(got, want)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_values_are_clamped(schedule: str) -> None:
    task = TASKS["skips"]
    batches = task.batches([6] * NUM_BATCHES)
    make = clipped_by_torch(lambda ps: nn.utils.clip_grad_value_(ps, 0.01), [])
    want = by_oracle(task, batches, 3, make, schedule=schedule)
    got, _ = train("skips", batches, 3, 3, {"clip_grad_value": 0.01}, schedule=schedule)
    assert_same(got, want)
    without = by_oracle(task, batches, 3, sgd, schedule=schedule)
    assert got.losses != without.losses


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_the_gradient_of_several_train_steps_is_clipped_once(schedule: str) -> None:
    task = TASKS["skips"]
    batches = task.batches([6] * NUM_BATCHES)
    norms: list[float] = []
    make = clipped_by_torch(lambda ps: nn.utils.clip_grad_norm_(ps, 0.1), norms)
    want = by_oracle(task, batches, 3, make, schedule=schedule, accumulate=2)
    got, got_norms = train(
        "skips", batches, 3, 3, {"max_grad_norm": 0.1}, schedule=schedule, accumulate=2
    )
    assert got_norms == norms
    assert len(norms) == NUM_BATCHES / 2
    assert_same(got, want)


def test_an_optimizers_own_step_gets_clipped_gradients() -> None:
    task = TASKS["skips"]
    batches = task.batches([6] * NUM_BATCHES)
    norms: list[float] = []
    make = clipped_by_torch(lambda ps: nn.utils.clip_grad_norm_(ps, 0.1), norms)
    want = by_oracle(task, batches, 3, make)
    got, got_norms = train(
        "skips", batches, 3, 3, {"max_grad_norm": 0.1}, lambda ps: OwnSGD(ps, lr=0.3, momentum=0.5)
    )
    assert got_norms == norms
    assert_same(got, want)


@pytest.mark.parametrize("schedule", ["pipedream", "chimera"])
def test_other_schedules_clip_by_their_own_gradients(schedule: str) -> None:
    """Chimera adds two sums; under pipedream stages are several batches apart."""
    task = TASKS["skips"]
    num_stages, m = (4, 1) if schedule == "pipedream" else (2, 4)
    batches = task.batches([2 * m] * NUM_BATCHES)
    with make_pipeline(task, num_stages, m, batches[0], schedule=schedule) as pipe:
        delay_of = {
            name: num_stages - 1 - stage.index
            for stage in pipe.session.stages.of_first_pipeline()
            for name in stage.weights.trainable
        }
    norms: list[float] = []
    make = clipped_by_torch(lambda ps: nn.utils.clip_grad_norm_(ps, 0.1), norms)
    want = by_oracle(task, batches, m, make, schedule=schedule, delay_of=delay_of)
    got, got_norms = train(
        "skips", batches, num_stages, m, {"max_grad_norm": 0.1}, schedule=schedule
    )
    assert got_norms == norms
    assert_same(got, want)


class OwnSGD(torch.optim.SGD):
    """No fused pass knows it."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
def test_all_stages_go_on_before_the_norm_is_known(kind: type[torch.optim.SGD]) -> None:
    task = TASKS["skips"]
    batches = task.batches([8] * NUM_BATCHES)
    with make_pipeline(task, 4, 4, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(kind(pipe.parameters(), lr=0.3), max_grad_norm=0.1)
        # Where the buffers cannot take turns, the next batch's gradients need one of their own.
        for report in pipe.memory_report().values():
            assert report.weights == (2 if kind is torch.optim.SGD else 1) * report.gradients
        with pipe.timeline() as timeline:
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
    for t in range(NUM_BATCHES - 1):
        mine = [e for e in timeline.rows if e.batch == t + 1]
        # The norm of batch t needs all of its backwards.
        known = max(e.start for e in timeline.rows if e.kind == "B" and e.batch == t)
        assert min(e.start for e in mine if (e.stage, e.kind) == (0, "F")) < known
    # The last stage's update waits longest. Its next backwards go on meanwhile.
    last = [e for e in timeline.rows if e.stage == 3]
    updates = {e.batch: e.end for e in last if e.kind == "U"}
    assert any(e.start < updates[e.batch - 1] for e in last if e.kind == "B" and e.batch > 0)


def test_the_norm_is_lazy() -> None:
    task = TASKS["skips"]
    batches = task.batches([4] * 3)
    with make_pipeline(task, 2, 2, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=math.inf)
        with pytest.raises(ValueError, match="there was none"):
            _ = opt.grad_norm
        pipe.train_step(*batches[0].args, target=batches[0].target)
        opt.step()
        norm = opt.grad_norm
        assert not norm.done()  # its last backward needs the next batch, or a flush
        assert "not there yet" in repr(norm)
        with pytest.raises(RuntimeError, match=r"GradNorm of train_step 0: .* 1 must still"):
            norm.item()  # would wait forever
        pipe.train_step(*batches[1].args, target=batches[1].target)
        assert norm.item() > 0
        opt.step()
        with pytest.raises(RuntimeError, match="GradNorm of train_step 1"):
            float(opt.grad_norm)
        pipe.flush()
        norm = opt.grad_norm
        assert norm.done()
        assert f"{norm:.3f}" == f"{norm.item():.3f}"
    with make_pipeline(task, 2, 2, batches[0], schedule="1f1b") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=math.inf)
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            assert float(opt.grad_norm) > 0


def test_bad_bounds_are_named() -> None:
    task = TASKS["skips"]
    batch = task.batches([4])[0]
    with make_pipeline(task, 2, 2, batch) as pipe:
        bad: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"max_grad_norm": 0}, ValueError, "max_grad_norm: 0, it must be > 0"),
            ({"max_grad_norm": -1.0}, ValueError, r"max_grad_norm: -1\.0"),
            ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm: nan"),
            ({"max_grad_norm": "1"}, TypeError, "max_grad_norm: '1' given"),
            ({"max_grad_norm": True}, TypeError, "max_grad_norm: True given"),
            ({"clip_grad_value": 0.0}, ValueError, r"clip_grad_value: 0\.0"),
            ({"max_grad_norm": 1.0, "norm_type": 0}, ValueError, "norm_type: 0"),
            ({"max_grad_norm": 1.0, "clip_grad_value": 1.0}, ValueError, "not both"),
        ]
        for options, kind, message in bad:
            with pytest.raises(kind, match=message):
                pd2.PipelineOptimizer(sgd(pipe.parameters()), **options)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pytest.raises(ValueError, match="max_grad_norm is None"):
            _ = opt.grad_norm


def test_a_failing_pipeline_ends_waiting_for_the_norm() -> None:
    task = TASKS["skips"]
    batch = task.batches([4])[0]
    pipe = make_pipeline(task, 2, 2, batch)
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=1.0)
    pipe.train_step(*batch.args, target=batch.target)
    opt.step()
    norm = opt.grad_norm
    pipe.close()
    with pytest.raises(RuntimeError, match=r"closed: close\(\) was called"):  # as a loss has it
        norm.item()


def test_a_schedule_that_would_deadlock_is_refused() -> None:
    schedule = pd2.load_schedule(STUBBORN)
    task = TASKS["skips"]
    batches = task.batches([1] * 3)
    with make_pipeline(task, 3, 1, batches[0], schedule=schedule) as pipe:
        rule = "clipping by norm needs every stage's gradients of batch t before"
        with pytest.raises(ValueError, match=rf"(?s){rule}.*rank 0 waits in 2F"):
            pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=1.0)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))  # trains without
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
