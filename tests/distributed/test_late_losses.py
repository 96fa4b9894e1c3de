"""Ranks that read a loss which comes during a later train_step alone, while others go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.trajectory import expected, make_pipeline, sgd
from tests.runs.transports import over
from tests.samples.models import TASKS

NUM_BATCHES = 7


def some_read_at_once(rank: int, world_size: int, schedule: str) -> None:
    """Rank r reads batch t's loss at once if bit t of a number of its own is set."""
    torch.set_num_threads(1)
    d, m, task = 2 * world_size, 2 * world_size, TASKS["drawing"]
    batches = task.batches([2 * m] * NUM_BATCHES)
    assert pd2.make_schedule(schedule, d, m, 2).forward_batches_behind == 1
    want = expected(task, [2 * m] * NUM_BATCHES, m, sgd, schedule=schedule)
    for bits in ([0b0000001] * 3, [0b0010010, 0, 0], [0, 0b0110100, 0b1010000], [0b1111111] * 3):
        options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": 2}
        with make_pipeline(task, d, m, batches[0], **options) as pipe:
            optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            losses = []
            for number, batch in enumerate(batches):
                losses.append(pipe.train_step(*batch.args, target=batch.target))
                if number == 3 and bits[rank] >> number & 1:
                    losses[number].item()  # before its step
                optimizer.step()
                if bits[rank] >> number & 1:
                    losses[number].item()
                if number == 4:
                    pipe.flush()
            pipe.flush()
            assert [float(loss) for loss in losses] == want.losses
            for name, value in pipe.state_dict().items():
                assert torch.equal(value, want.state[name]), (bits, name)


@pytest.mark.parametrize("schedule", ["2bw_v_half", "2bw_v"])
def test_who_reads_a_loss_at_once_makes_all_ranks_drain(schedule: str) -> None:
    run_ranks(some_read_at_once, 3, args=(schedule,))


def pauses_and_closes(rank: int, world_size: int, schedule: str) -> None:
    """Pauses longer than any rank waits, and closes while a loss would need another train_step."""
    torch.set_num_threads(1)
    d, m, task = 2 * world_size, 2 * world_size, TASKS["drawing"]
    batches = task.batches([2 * m] * 3)
    want = expected(task, [2 * m] * 3, m, sgd, schedule=schedule)
    options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": 2, "timeout": 3.0}
    pipe = make_pipeline(task, d, m, batches[0], **options)
    optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=1e9)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(pipe.train_step(*batch.args, target=batch.target))
        optimizer.step()
        if number == 1:
            time.sleep(3.5)
    assert [float(loss) for loss in losses[:2]] == want.losses[:2]
    pipe.close()


@pytest.mark.parametrize(
    ("schedule", "transport"), [("2bw_v_half", "gloo"), ("2bw_v", "shared memory")]
)
def test_a_loss_that_needs_another_train_step_is_not_waited_for(
    schedule: str, transport: str
) -> None:
    run_ranks(over, 3, args=(transport, pauses_and_closes, schedule))
