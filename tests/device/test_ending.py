"""Over a group like NCCL's, whose receives spin, no failure of one rank leaves another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
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

M, WIDTH = 4, 4
FAILS_AT = 3
"""The train_step, from 0."""
TIMEOUT = 2.0
LIMIT = TIMEOUT + 3.0
"""Seconds from the failure to the end of all others, their pipelines closed."""
SCHEDULES = ("2bw", "1f1b", "zero_bubble")
ENDS = ("forward", "backward", "step", "abort", "close")


class UserError(Exception):
    """What the user's code raises."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        fail()
        return gradients[0]


class FailingStep(torch.optim.SGD):
    """An optimizer without a fused pass, whose step fails."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if failing.get("how") == "step" and self.calls == FAILS_AT:
            fail()
        super().step(closure)


failing: dict[str, Any] = {}
"""How this process fails; and when it did."""


def fail() -> None:
    """Fails as ``failing`` says, at most once."""
    if failing.get("at") is None:
        failing["at"] = time.time()
        if failing["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("on purpose")


class Layer(nn.Linear):
    """Fails in the second microbatch of a batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.calls += 1
        if self.calls == FAILS_AT * M + 2 and failing.get("how") in ("forward", "kill"):
            fail()
        if self.calls == FAILS_AT * M + 2 and failing.get("how") == "backward":
            y = FailingBackward.apply(y)
        return y


def one_fails(rank: int, device: str, schedule: str, how: str, victim: int) -> dict[str, Any]:
    """Trains until one rank fails, closes, and says what it saw and when."""
    failing.clear()
    if rank == victim:
        failing["how"] = how
    model = moved([Layer() for _ in range(dist.get_world_size())], device)
    pipe = pd2.PipelineModule(
        model,
        mse_loss,
        num_stages=dist.get_world_size(),
        num_microbatches=M,
        schedule=schedule,
        example_args=(torch.zeros(1, WIDTH, device=device),),
        timeout=TIMEOUT,
    )
    make = FailingStep if how == "step" else torch.optim.SGD
    opt = pd2.PipelineOptimizer(make(pipe.parameters(), lr=0.01), max_grad_norm=1.0)
    x = torch.ones(2 * M, WIDTH, device=device)
    kind = text = ""
    try:
        for number in range(4 * FAILS_AT):
            loss = pipe.train_step(x, target=x)
            opt.step()
            if number == FAILS_AT and rank == victim and how in ("abort", "close"):
                failing["at"] = time.time()
                pipe.abort() if how == "abort" else pipe.close()
        float(loss)
    except (RuntimeError, ValueError) as error:
        kind, text = type(error).__name__, str(error)
    raised = time.time()
    pipe.close()
    try:
        pipe.state_dict()
        unread = ""
    except pd2.errors.StageError as error:
        unread = str(error)
    return {
        "kind": kind,
        "text": text,
        "unread": unread,
        "failed": failing.get("at"),
        "raised": raised,
        "closed": time.time(),
    }


def fail_in_turn(
    rank: int, world: int, schedules: Sequence[str], ends: Sequence[str]
) -> list[dict[str, Any]]:
    """One failure after the other, in one process group: each leaves it as it was."""
    device = join(rank, drains=0.05)
    checked.set_timeout(60.0)
    seen = []
    together = dist.new_group(backend="gloo")
    with mock.patch.object(channels, "make_device_ring", return_value=None):
        for schedule in schedules:
            for number, how in enumerate(ends):
                victim = number % world
                told = one_fails(rank, device, schedule, how, victim)
                seen.append({"case": f"{schedule}, {how}", "victim": victim, **told})
                # Ranks end seconds apart, and the next pipeline waits TIMEOUT for all to join.
                dist.barrier(together)
    dist.destroy_process_group()
    return seen


def check(case: str, survivors: Sequence[dict[str, Any]], failed: float) -> None:
    for told in survivors:
        assert told["kind"] in ("StageError", "PeerLost", "PeerTimeout"), (case, told)
        assert told["closed"] - failed < LIMIT, (case, told)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_ends_a_rank_ends_all(schedule: str) -> None:
    results = run_ranks(
        fail_in_turn, 3, args=[[schedule], ENDS], rendezvous="environment", timeout=90
    )
    for tellings in zip(*(result.value for result in results), strict=True):
        case, victim = tellings[0]["case"], tellings[0]["victim"]
        failed = tellings[victim]["failed"]
        assert failed is not None, tellings[0]
        assert tellings[victim]["unread"] == "", case  # no update here waited for another rank
        check(case, [told for rank, told in enumerate(tellings) if rank != victim], failed)


@pytest.mark.parametrize("victim", range(3))
def test_a_killed_rank_ends_all(victim: int) -> None:
    schedule = SCHEDULES[victim]
    results = run_ranks(
        kill_one,
        3,
        args=[schedule, victim],
        rendezvous="environment",
        timeout=40,
        expect_failure=True,
    )
    survivors = [result for result in results if result.rank != victim]
    assert [result.exit_code for result in survivors] == [0, 0], "\n".join(map(str, survivors))
    check(f"{schedule}, kill", [result.value for result in survivors], results[victim].ended)


def kill_one(rank: int, world: int, schedule: str, victim: int) -> dict[str, Any]:
    device = join(rank, drains=0.05)
    checked.set_timeout(60.0)
    with mock.patch.object(channels, "make_device_ring", return_value=None):
        told = one_fails(rank, device, schedule, "kill", victim)
    dist.destroy_process_group()
    return told
