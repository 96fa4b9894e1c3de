"""A rank that stops without ending, as of a machine that hangs, ends all others by a deadline."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.transports import TRANSPORTS, over

TIMEOUT = 4.0
MOST_SECONDS = TIMEOUT + 3
STOPPED_SECONDS = MOST_SECONDS + 2
"""After which the stopped rank is killed: whoever waits for it ends late."""


def join_with_store_in_rank_0(rank: int, world: int) -> None:
    """As ``init_process_group`` does without torchrun: the store dies, or hangs, with rank 0."""
    port = Path("port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path("port.partial").write_text(str(store.port), encoding="ascii")
        Path("port.partial").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text("ascii")), is_master=False)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def stop_this_process() -> None:
    command = f"sleep {STOPPED_SECONDS}; kill -9 {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], stdout=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def one_stops(rank: int, depth: int, stopped: int) -> dict[str, Any]:
    join_with_store_in_rank_0(rank, depth)
    x, y = torch.randn(2, 2 * depth, 4)
    pipe = pd2.PipelineModule(
        [nn.Linear(4, 4) for _ in range(depth)],
        mse_loss,
        num_microbatches=depth,
        example_args=(x[:1],),
        timeout=TIMEOUT,
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    kind = text = ""
    begin = time.monotonic()
    try:
        for batch in range(1000):
            if batch == 5 and rank == stopped:
                stop_this_process()
            begin = time.monotonic()
            float(pipe.train_step(x, target=y))
            opt.step()
    except RuntimeError as error:
        kind, text = type(error).__name__, str(error)
    raised = time.monotonic() - begin
    pipe.close()
    dist.destroy_process_group()
    ended = time.monotonic() - begin
    return {"kind": kind, "raised": raised, "ended": ended, "text": text}


def assert_ended(results: list[Any], stopped: int) -> None:
    for result in results:
        if result.rank == stopped:
            assert result.exit_code == -signal.SIGKILL
            continue
        seen = result.value
        assert seen is not None, result
        assert seen["kind"] in ("PeerTimeout", "PeerLost", "StageError"), seen
        assert seen["raised"] < MOST_SECONDS, seen
        assert seen["ended"] < MOST_SECONDS, seen


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_rank_ends_all_others(stopped: int, transport: str) -> None:
    """Rank 0 has the store to which failures are told."""
    results = run_ranks(
        over,
        3,
        args=(transport, one_stops, stopped),
        rendezvous="none",
        timeout=60,
        expect_failure=True,
    )
    assert_ended(results, stopped)
