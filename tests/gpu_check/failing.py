"""How two processes that share the device end when one of them fails, and what is left."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.runs.launch import RankResult
from tests.samples.models import WIDTH

from .device import Device, open_device, unordered_accesses
from .ranks import on_ranks, patience, together
from .section import Rows
from .training import sgd_of

M, FAILS_AT = 4, 3
SOON = 5.0  # seconds after a failure the other process has raised
TIMEOUT = 22.0  # of one pipeline
TOO_MUCH = 1 << 50  # bytes
KILLED = "kill -9"
HOW = (KILLED, "an exception", "out of memory")


def run(device: Device, rows: Rows) -> None:
    together(device, [functools.partial(ask, device, how, rows) for how in HOW])


def ask(device: Device, how: str, rows: Rows) -> None:
    with rows.guarded(how):
        results = on_ranks(
            device,
            rows,
            how,
            one_rank,
            2,
            how,
            seconds=patience(rows),
            rank_environment=True,
            expect_failure=how == KILLED,
        )
        if results is not None:
            judge(how, results, rows)


def judge(how: str, results: list[RankResult], rows: Rows, name: str = "") -> None:
    """Rank 1 failed; rank 0 says when it raised, what, and what it could still read."""
    told, name = results[0].value, name or how
    if told is None or "raised" not in told:
        rows.check(name, False, "the other process raised nothing\n" + str(results[0]))
        return
    failed = results[1].ended if how == KILLED else results[1].value["failed"]
    late = told["at"] - failed
    rows.check(f"{name}: the other process raises", late < SOON, f"{late:.2f} s: {told['raised']}")
    read, why = told["read"]
    rows.check(f"{name}: it can still read its weights on the device", read, why)
    rows.note(f"{name}: its state_dict()", told["state_dict"])


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
            if self.how == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "an exception":
                raise ZeroDivisionError("on purpose")
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)
        result: torch.Tensor = self.linear(x)
        return result


def one_rank(rank: int, world_size: int, device_type: str, how: str) -> dict[str, Any]:
    device = open_device(device_type)
    assert dist.get_backend() == "gloo"
    told = fail(device, how)
    races = unordered_accesses(device)
    assert not races, races[:3]
    return told


def fail(device: Device, how: str) -> dict[str, Any]:
    """Trains until this process or its peer fails; tells when, and what could be read then."""
    x = torch.randn(2 * M, WIDTH, device=device.torch)
    model = [nn.Linear(WIDTH, WIDTH, device=device.torch), _on(Failing(how), device)]
    pipe = pd2.PipelineModule(
        model, F.mse_loss, num_microbatches=M, example_args=(x,), timeout=TIMEOUT
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
            "read": read_weights(device, pipe),
            "state_dict": read_state(pipe),
        }
    finally:
        pipe.abort()
    return {}


def read_weights(device: Device, pipe: pd2.PipelineModule) -> tuple[bool, str]:
    """Whether the device still answers this process, which had its peer's memory open."""
    try:
        device.synchronize()
        finite = [bool(p.detach().isfinite().all()) for p in pipe.parameters()]
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"[:200]
    return bool(finite) and all(finite), f"{len(finite)} parameters"


def read_state(pipe: pd2.PipelineModule) -> str:
    """What a user who wants to save the weights after the failure gets."""
    try:
        state = pipe.state_dict()
    except Exception as error:
        return f"no: {type(error).__name__}: {error}"[:200]
    return f"yes: {', '.join(state)}"


def _on(module: Failing, device: Device) -> Failing:
    module.linear = nn.Linear(WIDTH, WIDTH, device=device.torch)
    return module
