"""The first batches of a warm-up have no delay; then nobody waits any more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from tests.runs.trajectory import (
    assert_same,
    by_oracle,
    by_pipeline,
    check_task,
    make_pipeline,
    sgd,
)
from tests.samples.models import TASKS
from tests.samples.odd_optimizers import CountsInGroup

SCHEDULES = [
    ("2bw", 1, 2, 1),
    ("2bw", 3, 4, 1),
    ("2bw_eager", 3, 5, 1),
    ("2bw_split", 4, 4, 1),
    ("interleaved_2bw", 4, 4, 2),
    ("pipedream", 4, 1, 1),
    ("1f1b", 3, 3, 1),
]


@pytest.mark.parametrize(("schedule", "d", "m", "v"), SCHEDULES)
@pytest.mark.parametrize("warmup", [1, 3, 20])
def test_a_warmed_up_pipeline_equals_the_oracle(
    schedule: str, d: int, m: int, v: int, warmup: int
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
    check_task(TASKS["skips"], d, m, [2 * m] * 8, warmup_batches=warmup, **options)
    if warmup == 3:
        check_task(
            TASKS["skips"], d, m, [2 * m] * 10, warmup_batches=warmup, accumulate=2, **options
        )


def test_an_optimizers_own_step_is_made_before_the_next_batch_of_the_warmup() -> None:
    check_task(TASKS["skips"], 3, 4, [8] * 7, CountsInGroup, warmup_batches=4)


@settings(max_examples=10, deadline=None)
@given(
    warmup=st.integers(0, 7),
    flush_before=st.sets(st.integers(1, 6)),
    load_before=st.integers(1, 7),
    d=st.integers(1, 4),
)
def test_flushing_changes_no_number_and_loaded_weights_begin_no_new_warmup(
    warmup: int, flush_before: set[int], load_before: int, d: int
) -> None:
    task, m = TASKS["skips"], 4
    batches = task.batches([m] * 8)

    def load(number: int, trained: Any, optimizer: Any) -> None:
        if number == load_before:
            state = task.model(seed=3).state_dict()
            if isinstance(trained, pd2.PipelineModule):
                trained.load_state_dict(state)
            else:
                trained.model.load_state_dict(state)
                trained.restart_delay()
        if number in flush_before and isinstance(trained, pd2.PipelineModule):
            trained.flush()

    want = by_oracle(task, batches, m, between=load, warmup_batches=warmup)
    got = by_pipeline(task, batches, d, m, between=load, warmup_batches=warmup)
    assert_same(got, want)


@pytest.mark.parametrize(("schedule", "d", "m"), [("2bw", 4, 4), ("pipedream", 3, 1)])
def test_the_last_warmup_batch_is_followed_without_a_drain(schedule: str, d: int, m: int) -> None:
    task, warmup, num_batches = TASKS["skips"], 3, 8
    batches = task.batches([m] * num_batches)
    options = {"schedule": schedule, "warmup_batches": warmup}
    with make_pipeline(task, d, m, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.timeline() as timeline:
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
        report = pipe.memory_report()
        delays = pipe.session.schedule.delay
    for event in (e for e in timeline.rows if e.kind != "U"):
        t, last_fresh = event.batch, warmup - 1
        version = t if t < warmup else max(t - delays[event.stage], last_fresh)
        assert event.version == version
    order = sorted((e.end, e.kind, e.batch, e.stage) for e in timeline.rows)
    of_first_stage = [(kind, batch) for _, kind, batch, stage in order if stage == 0]
    for t in range(1, num_batches):
        first_forward = of_first_stage.index(("F", t))
        drained = ("U", t - 1) in of_first_stage[:first_forward]
        assert drained == (t < warmup)
    assert all(stage.most_live_versions <= d - i for i, stage in report.items() if m == 1)
    assert all(stage.most_live_versions <= 2 for stage in report.values() if m > 1)


def test_bad_warmups_are_named() -> None:
    task = TASKS["mlp"]
    batch = task.batches([2])[0]
    with pytest.raises(ValueError, match="warmup_batches: -1, it must be at least 0"):
        make_pipeline(task, 2, 2, batch, warmup_batches=-1)
    for value in (1.5, True, None):
        with pytest.raises(TypeError, match=f"warmup_batches: {value} given"):
            make_pipeline(task, 2, 2, batch, warmup_batches=value)
