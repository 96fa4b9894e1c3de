"""Neither the caller nor a stage's thread runs ahead of the device without a bound."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.ranks import channels
from tests.device import checked
from tests.device.on_device import moved
from tests.device.test_processes import join
from tests.runs.launch import run_ranks
from tests.unit.planning.test_planner import made_profile

M, WIDTH = 4, 4
MOST_AHEAD = 2
"""Batches, of the caller before the stages' threads."""
MOST_BEHIND = 2
"""Microbatches that a stage's thread has ended, of its device."""


class Held(nn.Linear):
    """Computes nothing from the given call on until it is let go; ``None``: always at once."""

    gate: threading.Event | None = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Held.gate is not None:
            Held.gate.wait(30)
        return super().forward(x)


def make(device: str, num_stages: int, **options: Any) -> Any:
    pipe = pd2.PipelineModule(
        moved([Held() for _ in range(num_stages)], device),
        mse_loss,
        num_stages=num_stages,
        num_microbatches=M,
        example_args=(torch.zeros(1, WIDTH, device=device),),
        **options,
    )
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.01))


def returned_while_held(rank: int, device: str, schedule: str) -> tuple[int, int]:
    """How many train_steps return while a stage computes nothing, and how many inputs are kept."""
    Held.gate = gate = threading.Event()  # the same on all ranks, as all that a model's code reads
    gate.set()
    pipe, opt = make(device, 2, schedule=schedule, timeout=60.0)
    returned, seen = 0, []
    store = dist.distributed_c10d._get_default_store()
    inputs: list[weakref.ref[torch.Tensor]] = []
    with pipe:
        if rank == 1:
            gate.clear()

        def let_go() -> None:
            while returned < MOST_AHEAD:
                time.sleep(0.01)
            time.sleep(0.7)  # in which no more of them may return
            seen.append((returned, sum(each() is not None for each in inputs)))
            store.set(f"{schedule}/{rank}", "")
            store.wait([f"{schedule}/{each}" for each in range(2)])
            gate.set()

        watcher = threading.Thread(target=let_go)
        watcher.start()
        for _ in range(4 * MOST_AHEAD):
            x = torch.ones(2 * M, WIDTH, device=device)
            inputs.append(weakref.ref(x))
            pipe.train_step(x, target=x)
            opt.step()
            returned += 1
        watcher.join()
        pipe.flush()
    Held.gate = None
    return seen[0]


def run_ahead(rank: int, world: int) -> list[tuple[int, int]]:
    device = join(rank, drains=0.0)
    with mock.patch.object(channels, "make_device_ring", return_value=None):
        return [returned_while_held(rank, device, each) for each in ("2bw", "1f1b")]


def test_a_caller_is_two_batches_ahead_at_most() -> None:
    results = run_ranks(run_ahead, 2, rendezvous="environment", timeout=60)
    for result in results:
        for returned, kept in result.value:
            assert returned == MOST_AHEAD, result.value
            assert kept <= MOST_AHEAD + 1, result.value  # and that of the call that waits


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_device_is_two_microbatches_behind_its_stage_at_most(num_stages: int) -> None:
    pipe, opt = make("checked:0", num_stages)
    x = torch.ones(2 * M, WIDTH, device="checked:0")
    num_batches = 6
    with pipe:
        before = checked.count(checked.Ordering.HOST_WAIT)
        for _ in range(num_batches):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()
        waits = checked.count(checked.Ordering.HOST_WAIT) - before
        held = [each.messages_behind for each in pipe.memory_report().values()]
    # Of each stage's thread, for the last microbatch but two at each that it ends. Nobody waits for
    # losses that nobody reads, nor for numbers without clipping.
    assert waits == num_stages * (num_batches * M - MOST_BEHIND)
    # Values come to all stages but the first, and gradients to all but the last.
    message = 2 * WIDTH * 4
    kinds = [(stage > 0) + (stage < num_stages - 1) for stage in range(num_stages)]
    assert held == [(MOST_BEHIND + 1) * message * each for each in kinds]
    # What a plan for a GPU counts.
    profile = made_profile([1e-3] * num_stages, message_bytes=message // 2)
    on_gpu = dataclasses.replace(profile.device, type="cuda")
    plan = pd2.plan(
        dataclasses.replace(profile, device=on_gpu),
        devices=num_stages,
        memory="1GB",
        batch=2 * M,
        schedules=["2bw"],
        recompute=["none"],
        num_stages=num_stages,
    )
    assert [stage.message_bytes * 2 / plan.microbatch_rows for stage in plan.stages] == held
