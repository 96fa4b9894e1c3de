"""Schedules of which only a batch's first forwards are late train by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    by_pipeline,
    copy_of,
    make_pipeline,
    sgd,
    stage_of_parameters,
)
from tests.samples.models import TASKS

BATCHES = 6


def with_late_forwards(late: Sequence[int], num_microbatches: int) -> pd2.Schedule:
    """The order of "2bw", in which stage i has ``late[i]`` late forwards."""
    text = str(pd2.make_schedule("2bw", len(late), num_microbatches))
    head, rest = text.split("placement:", maxsplit=1)
    return pd2.load_schedule(f"{head}late: {','.join(map(str, late))}\nplacement:{rest}")


def fewest(num_stages: int, slots: int = 1) -> list[int]:
    """Forwards that a stage has done of the next batch when its update begins, and ``slots``."""
    return [num_stages - 1 - stage + slots for stage in range(num_stages)]


def by_definition(
    name: str, late: Sequence[int], m: int, rows: Sequence[int], make: Any = sgd, **options: Any
) -> Trajectory:
    task = TASKS[name]
    batches = task.batches(rows)
    with make_pipeline(task, len(late), m, batches[0], schedule="2bw") as pipe:
        late_of = {name: late[stage] for name, stage in stage_of_parameters(pipe).items()}
    return by_oracle(task, batches, m, make, schedule="2bw", late_of=late_of, **options)


def check(name: str, late: Sequence[int], m: int, rows: Sequence[int], **options: Any) -> None:
    of_both = {k: options[k] for k in ("accumulate", "warmup_batches") if k in options}
    want = by_definition(name, late, m, rows, **of_both)
    schedule = with_late_forwards(late, m)
    batches = TASKS[name].batches(rows)
    got = by_pipeline(TASKS[name], batches, len(late), m, schedule=schedule, **options)
    assert_same(got, want)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["mlp", "skips", "drawing", "gpt"])
def test_every_stage_has_its_own_number_of_late_forwards(name: str, num_stages: int) -> None:
    for m in (num_stages, 2 * num_stages + 1):
        check(name, fewest(num_stages), m, [2 * m] * BATCHES)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_numbers_that_the_order_allows(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 4))
    m = data.draw(st.integers(d, 8))
    late = [data.draw(st.integers(d - 1 - stage, m)) for stage in range(d)]
    check("skips", late, m, [2 * m, 2 * m + 1, m, 2 * m, 3 * m])


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"warmup_batches": 3}, {"recompute": True}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    check("skips", fewest(3), 5, [10] * 8, **options)


def test_one_late_forward_less_is_another_training() -> None:
    want = by_definition("mlp", [3, 2, 1], 4, [8] * BATCHES)
    other = by_definition("mlp", [3, 2, 0], 4, [8] * BATCHES)
    assert want.losses != other.losses
    all_late = by_definition("mlp", [4, 4, 4], 4, [8] * BATCHES)
    assert_same(by_oracle(TASKS["mlp"], TASKS["mlp"].batches([8] * BATCHES), 4), all_late)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step()


def test_updates_that_wait_for_each_other() -> None:
    """Clipping: a stage's fresh forwards wait for the norm of all stages' gradients."""
    task, m, late = TASKS["skips"], 5, fewest(3)
    batches = task.batches([2 * m] * BATCHES)
    want = by_definition(
        "skips", late, m, [2 * m] * BATCHES, lambda parameters: ClippedSGD(parameters, lr=0.3)
    )
    with make_pipeline(task, 3, m, batches[0], schedule=with_late_forwards(late, m)) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.3), max_grad_norm=0.1)
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        state = copy_of(pipe.state_dict())
    assert_same(Trajectory([float(loss) for loss in losses], state), want)


def test_late_forwards_take_no_memory_more() -> None:
    totals = []
    batch = TASKS["mlp"].batches([8])[0]
    for schedule in ("2bw", with_late_forwards([3, 2, 1], 4)):
        with make_pipeline(TASKS["mlp"], 3, 4, batch, schedule=schedule) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            for _ in range(4):
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            report = pipe.memory_report()
            totals.append([(each.weights, each.total) for each in report.values()])
    assert totals[0] == totals[1]


def test_what_a_schedule_says_of_them() -> None:
    schedule = with_late_forwards([3, 2, 1], 4)
    assert schedule.late_forwards == [3, 2, 1]
    assert pd2.load_schedule(str(schedule)) == schedule
    assert pd2.make_schedule("2bw", 3, 4).late_forwards == [4, 4, 4]
    assert pd2.make_schedule("1f1b", 3, 4).late_forwards == [0, 0, 0]


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ([5, 2, 1], "late_forwards of stage 0: expected 0 to 4"),
        ([1, 2, 1], "the update of batch 0 before .* reads version 1, found version 0"),
        ([3, 2, -1], r"late_forwards of stage 2: expected 0 to 4 \(num_microbatches\), found -1"),
    ],
)
def test_numbers_that_the_order_forbids(late: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_late_forwards(late, 4)
