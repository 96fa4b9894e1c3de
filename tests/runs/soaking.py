"""What a process holds while it trains for long, or builds pipelines over and over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.building_again import ENDS, each_round
from tests.runs.resources import Resources, resources

REPORTS = 20
CHECKPOINTS = Path("checkpoints")  # in the folder that all ranks run in
SAVE_EVERY, KEEP = 250, 2


def trained(batches: int, pipelines: int = 1) -> Iterator[Resources]:
    """What the process holds, at equal distances in so many batches.

    Args:
        pipelines: that train one after the other; each goes on from the one before.
    """
    save_every = min(SAVE_EVERY, -(-batches // 10))
    for number in range(pipelines):
        of_this_one = range(batches * number // pipelines, batches * (number + 1) // pipelines)
        yield from _trained(of_this_one, save_every, report_every=max(1, batches // REPORTS))


def _trained(batches: range, save_every: int, report_every: int) -> Iterator[Resources]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 16)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(2)]
    with pd2.PipelineModule(layers, mse_loss, num_microbatches=2, example_args=(x[:1],)) as pipe:
        optimizer = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=1e-3), max_grad_norm=1.0
        )
        saver = pd2.Checkpointer(CHECKPOINTS, pipe, optimizer, every=save_every, keep=KEEP)
        saver.resume()
        loss = None
        for batch in batches:
            if loss is not None:
                float(loss)
            loss = pipe.train_step(x[: 4 + batch % 5], target=y[: 4 + batch % 5])
            optimizer.step()
            saver.step()
            if batch % (save_every + 50) == save_every + 49:
                pipe.flush()
            if batch % (2 * save_every) == 2 * save_every - 1:
                pipe.eval()
                pipe(x)
                pipe.train()
            if batch % (4 * save_every) == 4 * save_every - 1:
                pipe.full_state_dict()
                optimizer.state_dict()
            if (batch + 1) % report_every == 0:
                pipe.flush()
                wait_for_saves()
                yield resources()
        saver.close()


def wait_for_saves() -> None:
    """Until those under way have ended, which is soon after a drain.

    Raises:
        AssertionError: they do not end, or older checkpoints stay.
    """
    deadline = time.monotonic() + 60
    while any(
        thread.name.startswith("pipedream2bw: checkpoint") for thread in threading.enumerate()
    ):
        assert time.monotonic() < deadline, "a save does not end"
        time.sleep(0.01)
    found = sorted(path.name for path in CHECKPOINTS.glob("*"))
    assert len(found) <= KEEP + 1, found  # which rank 0 may be removing


def soak(
    rank: int, world: int, batches: int, pipelines: int, cycles: int
) -> list[tuple[float, Resources]]:
    """Trains, or lets pipelines end if cycles are any; gives seconds since the start too."""
    start = time.monotonic()
    rounds = -(-cycles // len(ENDS))
    found = []
    for each in each_round(rank, rounds) if cycles else trained(batches, pipelines):
        found.append((time.monotonic() - start, each))
        print(f"{found[-1][0]:8.1f} s  {each}", flush=True)
    return found
