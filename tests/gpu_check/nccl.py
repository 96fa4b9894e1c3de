"""NCCL as far as one device goes: one rank; two where it lets them share it, else the refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw.ranks.devices import nccl_shares_devices
from tests.runs.trajectory import Trajectory, by_oracle
from tests.samples.models import TASKS

from . import failing
from .device import Device, open_device, unordered_accesses
from .ranks import on_ranks, patience, together
from .ring import WITHIN, counted_rings
from .section import Rows
from .sections import SHARING
from .training import by_processes, distance, repeatable, sgd, task_on

M, BATCHES = 4, 5
TIMEOUT = 12.0  # of one pipeline
NONE_SHARED = dict.fromkeys(dict(SHARING))
"""The section's own variables let ranks share a device; this takes them from a rank."""


def run(device: Device, rows: Rows) -> None:
    """The checked device's own group stands for NCCL: like it, it knows no tensors of the host.

    It lets no ranks share a device; two ranks have two of them there.
    """
    if device.is_gpu and not dist.is_nccl_available():
        rows.absent("NCCL", "torch is built without it")
        return
    name = "two ranks on one device"
    asked: list[Callable[[], None]] = [
        functools.partial(told, device, rows, "one rank", one_rank, 1, env=NONE_SHARED),
        functools.partial(told, device, rows, name, refused, 2, env=NONE_SHARED),
    ]
    if device.is_gpu:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        rows.note("NCCL", ".".join(map(str, version)))
        if not nccl_shares_devices():
            rows.absent("two ranks", "this NCCL lets none share a device; from 2.30 on it can")
            together(device, asked)
            return
    asked += [
        functools.partial(told, device, rows, "two ranks", two_ranks, 2),
        functools.partial(fails, device, rows, "an exception"),
        functools.partial(fails, device, rows, failing.KILLED),
    ]
    together(device, asked)


Answers = list[tuple[str, bool, str]]


def told(
    device: Device,
    rows: Rows,
    name: str,
    function: Callable[..., Answers],
    world_size: int,
    **options: Any,
) -> None:
    """Writes what each rank answers."""
    with rows.guarded(name):
        results = on_ranks(
            device,
            rows,
            name,
            function,
            world_size,
            seconds=patience(rows),
            rendezvous="environment",
            **options,
        )
        for result in results or []:
            for said, passed, detail in result.value:
                which = f", rank {result.rank}" if world_size > 1 else ""
                rows.check(f"{name}: {said}{which}", passed, detail)


def fails(device: Device, rows: Rows, how: str) -> None:
    name = f"two ranks, {how}"
    with rows.guarded(name):
        results = on_ranks(
            device,
            rows,
            name,
            failing_rank,
            2,
            how,
            seconds=patience(rows),
            rendezvous="environment",
            expect_failure=how == failing.KILLED,
        )
        if results is not None:
            failing.judge(how, results, rows, name)


def _begin(device_type: str, number: int = 0) -> Device:
    device = open_device(device_type)
    if not device.is_gpu:
        device = device._replace(number=number)
    device.module.set_device(device.torch)
    dist.init_process_group("nccl" if device.is_gpu else "checked")
    return device


def one_rank(rank: int, world_size: int, device_type: str) -> Answers:
    device = _begin(device_type)
    sums = torch.ones(1 << 20, device=device.torch)
    device.sleep(0.05)
    sums *= 3
    work = dist.all_reduce(sums, async_op=True)
    assert work is not None
    work.wait()
    sums += 1
    order = bool((sums == 4).all())
    task = task_on(TASKS["mlp"], device)
    batches = task.batches([2 * M] * BATCHES)
    got = by_processes(device, task, batches, num_stages=1, num_microbatches=M, timeout=TIMEOUT)
    apart = distance(got, by_oracle(task, batches, M, sgd))
    return [
        ("a sum is in the order of streams", order, ""),
        ("trains as the unsplit model", apart <= WITHIN, f"{apart:.1e}"),
    ]


def two_ranks(rank: int, world_size: int, device_type: str) -> Answers:
    """Two stages whose messages cross, and two replicas that are given the same batches."""
    device = _begin(device_type, rank)
    answers = []
    with repeatable(), counted_rings(allowed=False):
        task = task_on(TASKS["mlp"], device)
        batches = task.batches([2 * M] * BATCHES)
        want = by_oracle(task, batches, M, sgd)
        asked: dict[str, dict[str, Any]] = {
            "messages: stages as the unsplit model": {"num_stages": 2},
            "sums: replicas as the unsplit model": {"num_stages": 1, "width": 2},
        }
        for what, options in asked.items():
            got = by_processes(
                device, task, batches, num_microbatches=M, timeout=TIMEOUT, **options
            )
            losses = got.losses or want.losses
            held = {name: want.state[name] for name in got.state}
            apart = distance(Trajectory(losses, got.state), Trajectory(want.losses, held))
            answers.append((what, bool(held) and apart <= WITHIN, f"{apart:.1e}"))
    races = unordered_accesses(device)
    assert not races, races[:3]
    return answers


def failing_rank(rank: int, world_size: int, device_type: str, how: str) -> dict[str, Any]:
    device = _begin(device_type, rank)
    with counted_rings(allowed=False):
        return failing.fail(device, how)


def refused(rank: int, world_size: int, device_type: str) -> Answers:
    """Both have device 0, and a replica each: the package refuses NCCL that.

    The checked device's group does itself.
    """
    device = _begin(device_type)
    task = task_on(TASKS["mlp"], device)
    (batch,) = task.batches([2 * M])
    try:
        pd2.PipelineModule(
            task.model(),
            task.loss_fn,
            num_stages=1,
            width=2,
            num_microbatches=M,
            example_args=batch.args,
            timeout=TIMEOUT,
        )
    except Exception as error:
        text = str(error)
        if device.is_gpu:
            clear = isinstance(error, ValueError) and "one device" in text
        else:
            clear = "Duplicate GPU detected" in text
        return [("the refusal says why", clear, text.splitlines()[0])]
    return [("refused", False, "a pipeline was made")]
