"""Losses of schedules whose last stage forwards part of a batch during the next train_step."""

from __future__ import annotations

from collections.abc import Collection

import pytest

import pipedream2bw as pd2
from tests.runs.trajectory import Trajectory, assert_same, copy_of, expected, make_pipeline, sgd
from tests.samples.models import TASKS

V_SHAPED = [name for name in pd2.schedule_names() if name.startswith("2bw_v")]
NUM_BATCHES = 7


def train(schedule: str, d: int, m: int, read_at_once: Collection[int]) -> tuple[Trajectory, int]:
    """Also gives how often the pipeline was drained by a loss that was read."""
    task = TASKS["drawing"]
    batches = task.batches([2 * m] * NUM_BATCHES)
    options = {"schedule": schedule, "stages_per_rank": 2}
    with make_pipeline(task, d, m, batches[0], **options) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses, drains = [], 0
        for number, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
            if number:
                losses[number - 1] = losses[number - 1].item()
                assert pipe.session.first_unfinished is not None  # one batch late is free
            if number in read_at_once:
                losses[number].item()
                drains += pipe.session.first_unfinished is None
        state = copy_of(pipe.state_dict())
        return Trajectory([float(loss) for loss in losses], state), drains


@pytest.mark.parametrize("schedule", V_SHAPED)
@pytest.mark.parametrize("d", [4, 6])
def test_a_loss_read_at_once_drains_and_changes_no_number(schedule: str, d: int) -> None:
    m = 2 * d
    task = TASKS["drawing"]
    want = expected(task, [2 * m] * NUM_BATCHES, m, sgd, schedule=schedule)
    is_late = pd2.make_schedule(schedule, d, m, 2).forward_batches_behind > 0
    assert is_late or d == 4 or schedule == "2bw_v_min"  # a short way ends in time
    for read_at_once in ([], [0, 3, 4], range(NUM_BATCHES)):
        got, drains = train(schedule, d, m, read_at_once)
        assert drains == is_late * len(read_at_once)
        assert_same(got, want)
