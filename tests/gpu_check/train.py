"""The main job: a GPT in bfloat16 with masters, against the unsplit model and torch's 1F1B."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw.ranks.devices import nccl_shares_devices

from . import gpt, stock
from .device import Device, open_device
from .gpt import Size, Trained, size_on
from .ranks import on_ranks
from .section import NO_TIME, Rows
from .training import adamw_of

LAST = 4.0  # seconds before the section's end
LEAST, LEAST_OF_PROCESSES = 5.0, 16.0
"""Seconds: a training that would have fewer is not begun. The time is divided so."""
STARTING = 15.0  # seconds that processes may take more than their share, before they have failed
TOLD_OF = (1, 10, 50, 100)
"""Steps whose losses are told."""
ALIKE = 1e-3
"""Relative: by how much the first loss, of the same weights, may differ in bfloat16."""
TIMELINE = "gpu-check-timeline.png"
DRAWN_BATCHES = 3


@dataclasses.dataclass
class Job:
    """What all trainings share. ``path``: of their batches, for other processes."""

    device: Device
    rows: Rows
    size: Size
    path: Path
    batches: gpt.Batches
    unsplit: Trained | None = None


Run = Callable[[Job, str, float], "Trained | None"]
"""Trains under a name until an end of ``time.time()``; None, with a row, if it could not."""


def run(device: Device, rows: Rows) -> None:
    size = size_on(device)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        windows = gpt.make_batches(size)
        path = Path(folder) / "batches.pt"
        torch.save(windows, path)
        job = Job(device, rows, size, path, gpt.on_device(windows, device.torch))
        for number, (name, needs, train) in enumerate(RUNS):
            left = rows.seconds_left - LAST
            share = left * needs / sum(each for _, each, _ in RUNS[number:])
            if left < needs:
                rows.absent(name, NO_TIME)
                continue
            with rows.guarded(name):
                trained = train(job, name, time.time() + share)
                if trained is not None:
                    tell(job, name, trained)
            gc.collect()
            device.module.empty_cache()  # other processes want memory, too


def tell(job: Job, name: str, trained: Trained) -> None:
    rows, losses = job.rows, trained.losses
    job.unsplit = job.unsplit or (trained if name == UNSPLIT else None)
    what = f"{len(losses)} steps of {job.size.tokens} tokens"
    rows.figure(f"{name}: tokens/s", trained.tokens_a_second(job.size), detail=what)
    rows.figure(f"{name}: memory, GiB", trained.peak / 2**30)
    for step in TOLD_OF:
        if step <= len(losses):
            rows.figure(f"{name}: loss of step {step}", losses[step - 1])
    is_finite = all(map(math.isfinite, losses))
    rows.check(f"{name}: losses are finite", is_finite, f"{losses[0]:.4f} to {losses[-1]:.4f}")
    if job.unsplit is None or name == UNSPLIT:
        return
    theirs = job.unsplit
    ratio = trained.tokens_a_second(job.size) / theirs.tokens_a_second(job.size)
    rows.figure(f"{name}: tokens/s / unsplit's", ratio)
    last = min(len(losses), len(theirs.losses)) - 1
    rows.figure(f"{name}: loss of step {last + 1} / unsplit's", losses[last] / theirs.losses[last])
    apart = abs(losses[0] / theirs.losses[0] - 1)
    rows.check(f"{name}: the first loss is the unsplit model's", apart <= ALIKE, f"{apart:.1e}")


def by_unsplit(job: Job, name: str, end: float) -> Trained:
    return gpt.train(stock.unsplit(job.device, job.size), job.batches, job.size, end)


@contextlib.contextmanager
def pipeline(
    device: Device, size: Size, depth: int, tokens: torch.Tensor, **options: Any
) -> Iterator[tuple[pd2.PipelineModule, Callable[[torch.Tensor, torch.Tensor], pd2.Loss]]]:
    """Gives the pipeline and what trains a step."""
    with pd2.PipelineModule(
        gpt.stages(size, depth, device.torch),
        gpt.loss_fn,
        num_microbatches=size.num_microbatches,
        example_args=(tokens[: size.rows],),
        precision="bf16",
        timeout=20.0,
        **options,
    ) as pipe:
        remedies = pd2.ErrorFeedback() if options.get("schedule") == "2bw_fresh" else ()
        opt = pd2.PipelineOptimizer(adamw_of(device, pipe.parameters()), staleness=remedies)

        def step(tokens: torch.Tensor, target: torch.Tensor) -> pd2.Loss:
            loss = pipe.train_step(tokens, target=target)
            opt.step()
            return loss

        yield pipe, step


def by_threads(depth: int, *, draws: bool = False, **options: Any) -> Run:
    def train(job: Job, name: str, end: float) -> Trained:
        with pipeline(job.device, job.size, depth, job.batches[0][0], **options) as (pipe, step):
            trained = gpt.train(step, job.batches, job.size, end)
            if draws:
                with job.rows.guarded("the timeline"):
                    draw(job, pipe, step)
        return trained

    return train


def draw(job: Job, pipe: pd2.PipelineModule, step: Callable[..., object]) -> None:
    """A picture of a few batches, beside the results."""
    with pipe.timeline() as timeline:
        for tokens, target in job.batches[:DRAWN_BATCHES]:
            step(tokens, target)
    if job.rows.pictures is None:
        job.rows.note("the timeline", f"{len(timeline.rows)} actions")
        return
    title = (
        f"{DRAWN_BATCHES} batches of {job.size.num_microbatches} microbatches, {job.device.name}"
    )
    pd2.draw_timeline(timeline.rows, job.rows.pictures / TIMELINE, title=title)
    job.rows.note("the timeline", TIMELINE)


def by_processes(job: Job, name: str, end: float) -> Trained | None:
    device, args = job.device, (str(job.path), end)
    results = on_ranks(
        device,
        job.rows,
        name,
        rank_of_ours,
        2,
        *args,
        seconds=_patience(job, end),
        rank_environment=True,
    )
    return None if results is None else _of_both(*(each.value for each in results))


def by_torch(job: Job, name: str, end: float) -> Trained | None:
    """Over NCCL where that lets both ranks have the device, else over gloo by the hosts' memory."""
    device = job.device
    over_nccl = device.is_gpu and nccl_shares_devices()
    way = "nccl" if over_nccl else "gloo, through the hosts' memory"
    job.rows.note(f"{name}: messages", way)
    results = on_ranks(
        device,
        job.rows,
        name,
        rank_of_torchs,
        2,
        str(job.path),
        end,
        over_nccl,
        seconds=_patience(job, end),
        rendezvous="environment",
    )
    return None if results is None else _of_both(*(each.value for each in results))


def _patience(job: Job, end: float) -> float:
    """Processes that hang leave time for what is behind them."""
    return max(min(job.rows.seconds_left - LAST / 2, end - time.time() + STARTING), 1.0)


def _of_both(first: Trained, last: Trained) -> Trained:
    """The last rank's figures, and the memory of both."""
    return dataclasses.replace(last, peak=first.peak + last.peak)


def rank_of_ours(rank: int, world_size: int, device_type: str, path: str, end: float) -> Trained:
    device = open_device(device_type)
    size, batches = size_on(device), gpt.on_device(torch.load(path), device.torch)
    with pipeline(device, size, world_size, batches[0][0]) as (_, step):
        return gpt.train(step, batches, size, end)


def rank_of_torchs(
    rank: int, world_size: int, device_type: str, path: str, end: float, over_nccl: bool
) -> Trained:
    device = open_device(device_type)
    if over_nccl:
        device.module.set_device(device.torch)
    dist.init_process_group("nccl" if over_nccl else "gloo")
    size, batches = size_on(device), gpt.on_device(torch.load(path), device.torch)
    step = stock.one_f_one_b(device, size, rank, world_size, over_hosts=not over_nccl)
    trained = gpt.train(step, batches, size, end)
    dist.destroy_process_group()
    return trained


UNSPLIT = "unsplit"
RUNS: tuple[tuple[str, float, Run], ...] = (
    (UNSPLIT, LEAST, by_unsplit),
    ("threads, d = 1", LEAST, by_threads(1)),
    ("threads, d = 1, graphs", LEAST, by_threads(1, graphs="auto")),
    ("threads, d = 2", LEAST, by_threads(2)),
    ("threads, d = 2, graphs", LEAST, by_threads(2, graphs="auto")),
    ("threads, d = 2, fresh, feedback", LEAST, by_threads(2, schedule="2bw_fresh", graphs="auto")),
    ("two processes, d = 2", LEAST_OF_PROCESSES, by_processes),
    ("torch's 1F1B, d = 2", LEAST_OF_PROCESSES, by_torch),
    ("threads, d = 4", LEAST, by_threads(4, draws=True)),
)
