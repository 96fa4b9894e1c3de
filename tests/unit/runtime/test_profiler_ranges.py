"""Every executed action is a range of torch.profiler, in the thread that executed it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import pipedream2bw as pd2
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS, Batch

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputed forward",
}


def assert_ranges_are_the_timelines_actions(
    pipe: pd2.PipelineModule, m: int, batches: Sequence[Batch]
) -> None:
    """On every rank: those of the stages that it runs."""
    optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with (
        profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler,
        pipe.timeline() as timeline,
    ):
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            optimizer.step()
        pipe.flush()
        with torch.no_grad():
            pipe(*batches[0].args)
    events = [event for event in profiler.events() if event.name.startswith("pd2 stage")]
    own = pipe.stages
    want = {
        f"pd2 stage {e.stage} update batch {e.batch} version {e.version}"
        if e.kind == "U"
        else f"pd2 stage {e.stage} {NAMES[e.kind]} batch {e.batch} microbatch {e.microbatch} "
        f"version {e.version}"
        for e in timeline.rows
        if e.stage in own
    }
    newest = len(batches)
    want |= {
        f"pd2 stage {stage} evaluation microbatch {j} version {newest}"
        for stage in own
        for j in range(m)
    }
    assert sorted(event.name for event in events) == sorted(want)
    threads = {event.name.split()[2]: event.thread for event in events}
    assert len(set(threads.values())) == len(own) == len(threads)
    # Operators are inside their action's range.
    inner = [e for e in profiler.events() if e.name == "aten::linear"]
    assert inner
    assert all(
        any(e.time_range.start <= op.time_range.start <= e.time_range.end for e in events)
        for op in inner
    )


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("2bw", False), ("2bw_split", True), ("1f1b", False)]
)
def test_ranges_are_the_timelines_actions(schedule: str, recompute: bool) -> None:
    task, m = TASKS["skips"], 3
    batches = task.batches([6] * 4)
    with make_pipeline(task, 2, m, batches[0], schedule=schedule, recompute=recompute) as pipe:
        assert_ranges_are_the_timelines_actions(pipe, m, batches)


def test_nothing_is_recorded_of_other_threads_by_default() -> None:
    task = TASKS["mlp"]
    batches = task.batches([4, 4])
    with make_pipeline(task, 2, 2, batches[0]) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                optimizer.step()
            pipe.flush()
    assert not [event for event in profiler.events() if event.name.startswith("pd2 stage")]
