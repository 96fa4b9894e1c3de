"""Who waits for the device between two batches of the steady state."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2

from .blocks import blocks
from .device import Device
from .section import Rows
from .training import adamw_of

NUM_STAGES, M = 2, 4
WARM_UP, STEADY = 4, 10
LOSSES, NORMS = 1, NUM_STAGES
"""A batch's copies to the host: one of the losses, and with a loss scale each stage's norm."""
FENCES = NUM_STAGES * M
"""A batch's waits for events: each stage's thread, in each microbatch, for what it gave two ago."""


@dataclasses.dataclass
class Waits:
    """How often a thread waited for the device: one that runs Python code, or the engine's own."""

    by_python: int = 0
    by_engine: int = 0


def run(device: Device, rows: Rows) -> None:
    cases: dict[str, dict[str, Any]] = {
        "without clipping": {},
        "with clipping": {"max_grad_norm": 1.0},
        "with a loss scale": {"loss_scale": pd2.LossScale(1.0)},
    }
    for what, options in cases.items():
        with rows.guarded(what):
            judge(device, rows, what, options)


def judge(device: Device, rows: Rows, what: str, options: dict[str, Any]) -> None:
    waits = count(device, options)
    rows.check(f"{what}: the caller's waits", waits.by_python == 0, str(waits.by_python))
    others = waits.by_engine
    # CUDA counts copies that a host waits for, the checked device waits for events, too.
    at_most = LOSSES + NORMS * ("loss_scale" in options) + FENCES * (device.type == "checked")
    rows.check(
        f"{what}: waits of all other threads",
        others <= at_most * (STEADY + 1),  # a batch that began before may end meanwhile
        f"{others / STEADY:g} a batch",
    )


def count(device: Device, options: dict[str, Any]) -> Waits:
    x = torch.randn(2 * M, 16, 64, device=device.torch)
    with pd2.PipelineModule(
        blocks(4, 64, device.torch),
        F.mse_loss,
        num_stages=NUM_STAGES,
        num_microbatches=M,
        example_args=(x,),
        timeout=60.0,
    ) as pipe:
        opt = pd2.PipelineOptimizer(adamw_of(device, pipe.parameters()), **options)

        def train(batches: int) -> None:
            for _ in range(batches):
                pipe.train_step(x, target=x)
                opt.step()

        train(WARM_UP)
        device.synchronize()
        with counted(device) as waits:
            train(STEADY)
        pipe.flush()
    return waits


@contextlib.contextmanager
def counted(device: Device) -> Iterator[Waits]:
    """Gives what is filled in at the end, as the device itself counts."""
    waits = Waits()
    if device.type == "checked":
        from tests.device import checked

        with checked.log() as asked:
            yield waits
        threads = [each.thread for each in asked if each.kind == checked.AskedKind.HOST_WAIT]
        waits.by_engine = sum(thread.startswith("pd2 ") for thread in threads)
        waits.by_python = len(threads) - waits.by_engine
        return
    # A thread of C++ writes its warnings to stderr, which is a file here.
    kept = os.dup(2)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as seen:
        path = Path(folder) / "stderr"
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
            os.dup2(kept, 2)
            os.close(file)
            os.close(kept)
        mark = "synchronizing CUDA operation"
        waits.by_python = sum(mark in str(warning.message) for warning in seen)
        waits.by_engine = path.read_text(errors="replace").count(mark)
