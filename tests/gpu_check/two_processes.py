"""Two stages in two processes that share the device, and how they end when one fails."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.ranks import channels
from pipedream2bw.ranks.device_rings import DeviceRing, make_device_ring
from tests.runs.launch import RankError, RankResult, run_ranks
from tests.runs.trajectory import Trajectory, by_oracle
from tests.samples.models import TASKS, WIDTH

from .device import Device, open_device, unordered_accesses
from .section import Rows
from .training import by_processes, distance, repeatable, sgd, sgd_of, task_on

M, BATCHES, FAILS_AT = 4, 6, 3
WITHIN = 1e-6
SOON = 5.0  # seconds after a failure the other process has raised
SECONDS = 25.0
TOO_MUCH = 1 << 50  # bytes
SHARED, STAGED = "the device's shared memory", "staged in the hosts' memory"
"""How messages travel; the first is what two processes get that can open each other's memory."""


def run(device: Device, rows: Rows) -> None:
    with repeatable():
        task = task_on(TASKS["mlp"], device)
        want = by_oracle(task, task.batches([2 * M] * BATCHES), M, sgd).on_host()
    for how in (SHARED, STAGED):
        trained = _ranks(device, how, rows)
        if trained is None:
            return
        state = {name: value for each in trained for name, value in each.value["state"].items()}
        apart = distance(Trajectory(trained[0].value["losses"], state), want)
        rows.check(f"{how}: as the unsplit model", apart <= WITHIN, f"{apart:.1e}")
        rings = [each.value["rings"] for each in trained]
        expected = [2 if how == SHARED else 0] * 2  # one for each direction
        rows.check(f"{how}: such channels", rings == expected, f"{rings}, expected {expected}")
    for how in ("kill -9", "an exception", "out of memory"):
        failed = _ranks(device, how, rows)
        if failed is not None:
            _judge(how, failed, rows)


def _ranks(device: Device, how: str, rows: Rows) -> list[RankResult] | None:
    """What both left; None, with a row, where they did not begin or end."""
    try:
        return run_ranks(
            one_rank,
            2,
            args=(device.type, how),
            timeout=SECONDS,
            rank_environment=True,
            expect_failure=how == "kill -9",
        )
    except RankError as error:
        rows.check(how, False, str(error))
        return None


def _judge(how: str, results: list[RankResult], rows: Rows) -> None:
    """Rank 1 failed; rank 0 says when it raised, and what."""
    told = results[0].value
    if told is None or "raised" not in told:
        rows.check(how, False, "the other process raised nothing\n" + str(results[0]))
        return
    failed = results[1].ended if how == "kill -9" else results[1].value["failed"]
    late = told["at"] - failed
    rows.check(f"{how}: the other process raises", late < SOON, f"{late:.2f} s: {told['raised']}")


_failures: list[float] = []
"""When this process failed. Not the module's: a pipeline runs clones of it."""


class Failing(nn.Module):
    """Fails in one microbatch of one rank."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == FAILS_AT * M:
            _failures.append(time.time())
            if self.how == "kill -9":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "an exception":
                raise ZeroDivisionError("on purpose")
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)
        result: torch.Tensor = self.linear(x)
        return result


def one_rank(rank: int, world_size: int, device_type: str, how: str) -> dict[str, Any]:
    device = open_device(device_type)
    assert dist.get_backend() == "gloo"
    told = _train_by(how, device) if how in (SHARED, STAGED) else _fail(device, rank, how)
    races = unordered_accesses(device)
    assert not races, races[:3]
    return told


def _train_by(how: str, device: Device) -> dict[str, Any]:
    rings = []

    def make(*args: Any) -> DeviceRing | None:
        ring = make_device_ring(*args) if how == SHARED else None
        rings.append(ring is not None)
        return ring

    with mock.patch.object(channels, "make_device_ring", make):
        return {**_train(device), "rings": sum(rings)}


def _train(device: Device) -> dict[str, Any]:
    with repeatable():
        task = task_on(TASKS["mlp"], device)
        batches = task.batches([2 * M] * BATCHES)
        trained = by_processes(
            device, task, batches, num_stages=2, num_microbatches=M, timeout=SECONDS
        ).on_host()
    return {"losses": trained.losses, "state": trained.state}


def _fail(device: Device, rank: int, how: str) -> dict[str, Any]:
    x = torch.randn(2 * M, WIDTH, device=device.torch)
    model = [nn.Linear(WIDTH, WIDTH, device=device.torch), _on(Failing(how), device)]
    pipe = pd2.PipelineModule(
        model, F.mse_loss, num_microbatches=M, example_args=(x,), timeout=SECONDS
    )
    opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
    try:
        for _ in range(100):
            loss = pipe.train_step(x, target=x)
            opt.step()
            loss.item()
    except Exception as error:
        return {
            "raised": f"{type(error).__name__}: {error}"[:200],
            "at": time.time(),
            "failed": max(_failures, default=0.0),
        }
    finally:
        pipe.abort()
    return {}


def _on(module: Failing, device: Device) -> Failing:
    module.linear = nn.Linear(WIDTH, WIDTH, device=device.torch)
    return module
