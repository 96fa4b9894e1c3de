"""Delayed collectives, which other tests rely on to shake out races."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from benchmarks.measuring.delays import delayed_collectives
from pipedream2bw import _C
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.groups import new_group
from tests.runs.launch import run_ranks
from tests.runs.trajectory import make_pipeline
from tests.samples.models import TASKS

DELAY = 0.3


def nothing_is_read_or_written_before_it_begins(rank: int, world: int) -> None:
    with delayed_collectives(DELAY, DELAY):
        group = new_group([range(world)], Deadline(60.0, _C.Fault()))
    tensor = torch.full([3], 1.0 + rank)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    tensor += 10  # too early, as only a late sum shows
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="not begun in time"):
        work.wait(datetime.timedelta(milliseconds=1))
    assert tensor.tolist() == [11.0 + rank] * 3
    work.wait()
    assert tensor.tolist() == [23.0] * 3
    assert work.is_completed()
    task = TASKS["mlp"]
    (batch,) = task.batches([4])
    with (
        delayed_collectives(DELAY, DELAY),
        make_pipeline(task, world, 4, batch, schedule="1f1b") as pipe,
    ):
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), max_grad_norm=1.0)
        start = time.perf_counter()
        pipe.train_step(*batch.args, target=batch.target)
        assert time.perf_counter() - start >= 2 * DELAY  # the ranks' rows are gathered, then told
        opt.step()
        float(opt.grad_norm)
        assert time.perf_counter() - start >= 3 * DELAY  # and norms are summed


def test_what_processes_send_together_begins_later() -> None:
    run_ranks(nothing_is_read_or_written_before_it_begins, 2, timeout=60)
