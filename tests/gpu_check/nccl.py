"""NCCL as far as one device goes: one rank, and the refusal of two."""

from __future__ import annotations

import torch
import torch.distributed as dist

import pipedream2bw as pd2
from tests.runs.launch import RankError, run_ranks
from tests.runs.trajectory import by_oracle
from tests.samples.models import TASKS

from .device import Device, open_device
from .section import Rows
from .training import by_processes, distance, sgd, task_on

M, BATCHES = 4, 5
SECONDS = 15.0
WITHIN = 1e-6


def run(device: Device, rows: Rows) -> None:
    """The checked device's own group stands for NCCL: like it, it knows no tensors of the host."""
    if device.is_gpu and not dist.is_nccl_available():
        rows.absent("NCCL", "torch is built without it")
        return
    for name, rank_of, world_size in (("one rank", one_rank, 1), ("two ranks", two_ranks, 2)):
        try:
            results = run_ranks(
                rank_of,
                world_size,
                args=(device.type,),
                timeout=SECONDS,
                rendezvous="environment",
            )
        except RankError as error:
            rows.check(name, False, str(error))
            continue
        for result in results:
            for said, passed, detail in result.value:
                rows.check(f"{name}: {said}", passed, detail)


Answers = list[tuple[str, bool, str]]


def _begin(device_type: str) -> Device:
    device = open_device(device_type)
    device.module.set_device(0)
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
    got = by_processes(device, task, batches, num_stages=1, num_microbatches=M, timeout=SECONDS)
    apart = distance(got, by_oracle(task, batches, M, sgd))
    return [
        ("a sum is in the order of streams", order, ""),
        ("trains as the unsplit model", apart <= WITHIN, f"{apart:.1e}"),
    ]


def two_ranks(rank: int, world_size: int, device_type: str) -> Answers:
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
            timeout=SECONDS,
        )
    except Exception as error:
        text = str(error)
        if device.is_gpu:
            clear = isinstance(error, ValueError) and "one device" in text
        else:
            clear = "Duplicate GPU detected" in text
        return [("the refusal says why", clear, text.splitlines()[0])]
    return [("refused", False, "a pipeline was made")]
