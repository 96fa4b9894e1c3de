"""A pipeline can end in any way and be built again, in the same processes and process group."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.building_again import (
    after_each_round,
    fails_making_groups_and_trains,
    is_flat,
)
from tests.runs.launch import in_turn, run_ranks
from tests.runs.transports import GLOO, SHARED_MEMORY, over

BUSY_SECONDS = 4.0
AT_ONCE = 2.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")


class Busy(nn.Linear):
    """Is busy for long in its second training forward."""

    def __init__(self, is_busy: bool) -> None:
        super().__init__(4, 4)
        self.is_busy = is_busy
        self.calls = [0]  # shared with the pipeline's copies of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.calls[0] += 1
            if self.is_busy and self.calls[0] == 2:
                time.sleep(BUSY_SECONDS)
        return super().forward(x)


def rank_0_aborts_while_the_other_is_busy(rank: int, world: int) -> dict[str, Any]:
    x = torch.randn(4, 4)
    layers = [Busy(False), Busy(rank == 1)]
    pipe = pd2.PipelineModule(layers, mse_loss, num_microbatches=2, example_args=(x[:1],))
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    seen: dict[str, Any] = {"kind": "", "rank": None}
    try:
        pipe.train_step(x, target=x)
        optimizer.step()
        if rank == 0:
            time.sleep(0.5)
            start = time.monotonic()
            pipe.abort()
            seen["seconds"] = time.monotonic() - start
        pipe.flush()
    except pd2.errors.StageError as error:
        seen.update(kind=type(error).__name__, rank=error.rank, text=str(error))
    return seen


@on_linux
@pytest.mark.slow
def test_pipelines_that_ended_leave_no_thread_file_or_group_behind() -> None:
    """Three rounds of eleven ends each; the first is that of a process's own first uses."""
    results = run_ranks(
        over,
        2,
        args=(SHARED_MEMORY, after_each_round, 3),
        rendezvous="environment",
        timeout=100,
    )
    for result in results:
        assert is_flat(result.value), list(map(str, result.value))


@pytest.mark.slow
def test_abort_waits_for_nobody_and_tells_all_and_groups_that_only_some_made_do_no_harm() -> None:
    results = run_ranks(
        over,
        2,
        args=(GLOO, in_turn, rank_0_aborts_while_the_other_is_busy, fails_making_groups_and_trains),
        timeout=60,
    )
    for result in results:
        aborted, _ = result.value
        assert (aborted["kind"], aborted["rank"]) == ("PeerLost", 0), aborted
        assert "abort() was called" in aborted["text"]
    assert results[0].value[0]["seconds"] < AT_ONCE
