"""What replicas send each other to add up their gradients, and what they keep for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks

NUMEL, COUNT = 1 << 20, 4


class Scaled(nn.Module):
    """Its one parameter is most of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[: x.shape[1]]


def bytes_written() -> int:
    """By this process: to sockets and files, not to memory that it shares."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def bytes_sent(pipe: Any, opt: Any, x: torch.Tensor, batches: int) -> int:
    """By this process in so many batches, after one that may send more."""
    before = 0
    for batch in range(1 + batches):
        pipe.train_step(x, target=x)
        opt.step()
        if batch == 0:
            pipe.flush()
            before = bytes_written()
    pipe.flush()
    return bytes_written() - before


def trained(world: int, hook: Any = None, **options: Any) -> tuple[float, int]:
    """Bytes sent in a batch over those of the gradients; and those of the room for others'."""
    x = torch.ones(2, 8)
    with pd2.PipelineModule(
        [Scaled()], mse_loss, num_microbatches=2, width=world, example_args=(x,), **options
    ) as pipe:
        if hook is not None:
            pipe.register_comm_hook(None, hook)
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        sent = bytes_sent(pipe, opt, x, COUNT)
        return sent / (COUNT * 4 * NUMEL), pipe.memory_report()[0].replica_sums


def sums(rank: int, world: int) -> list[tuple[float, int]]:
    with pytest.raises(ValueError, match="replica_sums: 'ring', known: 'ordered', 'all_reduce'"):
        trained(world, replica_sums="ring")
    return [
        trained(world),
        trained(world, replica_sums="all_reduce"),
        trained(world, bucket_cap_mb=1.0),
        trained(world, allreduce_hook),
        trained(world, fp16_compress_hook),
    ]


def test_ordered_sums_and_dense_hooks_send_the_bytes_of_an_all_reduce() -> None:
    world, mib = 4, 1 << 20
    for result in run_ranks(sums, world, timeout=100):
        (ordered, room), (reduced, none), (_, small_room), hooked, compressed = result.value
        assert ordered == pytest.approx(2 * (world - 1) / world, rel=0.01)
        assert reduced == pytest.approx(2 * (world - 1) / world, rel=0.01)
        # Others' pieces of the whole gradient and its flag; of two parts of a bucket's size.
        assert 3 * mib <= room < 3 * mib + 64
        assert none == 0
        assert hooked == (pytest.approx(2 * (world - 1) / world, rel=0.01), 0)
        assert compressed == (pytest.approx((world - 1) / world, rel=0.01), 0)
        assert mib < small_room <= 1.5 * mib
