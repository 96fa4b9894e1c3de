"""Trainings with torch's other allocators, which are chosen before a process uses the device."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.samples.models import TASKS

from .device import Device, open_device, unordered_accesses
from .jitter import Jitter
from .ranks import on_ranks, patience, together
from .ring import WITHIN, counted_rings, judge_ranks, judge_rings
from .section import Rows
from .training import (
    Case,
    by_definition,
    by_processes,
    by_threads,
    distance,
    repeatable,
    task_on,
)

ON_A_GPU = ("expandable_segments:True", "backend:cudaMallocAsync")
ELSEWHERE = ("",)
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The newer name, and the one that torch reads where it does not know that."""
M, BATCHES = 4, 6
CASE = Case(num_stages=3, num_microbatches=M)
TIMEOUT = 10.0


def run(device: Device, rows: Rows) -> None:
    settings = ON_A_GPU if device.is_gpu else ELSEWHERE
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        together(device, [functools.partial(ask, device, rows, each, folder) for each in settings])


def ask(device: Device, rows: Rows, setting: str, folder: str) -> None:
    """Two processes, which train by threads each, and then together."""
    name = setting or "as it is"
    meeting = Path(folder) / name.replace(":", "-")
    with rows.guarded(name):
        results = on_ranks(
            device,
            rows,
            name,
            one_rank,
            2,
            str(meeting),
            seconds=patience(rows),
            rendezvous="none",
            env=dict.fromkeys(VARIABLES, setting or None),
        )
        if results is None:
            return
        told = [each.value for each in results]
        rows.note(f"{name}: torch's allocator", told[0]["allocator"])
        apart = max(each["threads"] for each in told)
        rows.check(f"{name}: threads as the unsplit model", apart <= WITHIN, f"{apart:.1e}")
        judge_ranks(rows, f"{name}: processes as the unsplit model", told, told[0]["want"])
        if device.has_kernels:
            judge_rings(rows, f"{name}: channels in shared memory", told)
        else:
            rows.absent(f"{name}: channels in shared memory", "the package is built without")


def one_rank(rank: int, world_size: int, device_type: str, meeting: str) -> dict[str, Any]:
    device = open_device(device_type)
    told: dict[str, Any] = {}
    with repeatable():
        task = task_on(TASKS["mlp"], device)
        batches = task.batches([2 * M] * BATCHES)
        told["allocator"] = str(torch.cuda.get_allocator_backend()) if device.is_gpu else "its own"
        want = by_definition(task, batches, CASE)
        with Jitter(device, rank) as jitter:
            got = by_threads(device, task, batches, CASE, jitter=jitter)
        told["threads"] = distance(got, want)
        told["want"] = want.on_host()
        os.environ["LOCAL_RANK"] = str(rank)  # both may see several devices: they choose one
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
        )
        with counted_rings() as rings:
            trained = by_processes(
                device, task, batches, num_stages=2, num_microbatches=M, timeout=TIMEOUT
            ).on_host()
    dist.destroy_process_group()
    races = unordered_accesses(device)
    assert not races, races[:3]
    return {"losses": trained.losses, "state": trained.state, "rings": rings, **told}
