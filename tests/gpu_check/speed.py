"""The unsplit model with accumulated gradients against stages as threads of one device."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2

from .blocks import blocks
from .device import Device
from .section import Rows
from .training import adamw_of

M = 8
BLOCKS = 6


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a microbatch, and how many batches are timed at once."""

    name: str
    rows: int
    length: int
    width: int
    batches: int


LARGE = Size("large", 4, 256, 1024, 5)
SMALL = Size("small", 2, 64, 256, 10)
TINY = Size("tiny", 1, 8, 64, 1)
DEPTHS: dict[Size, tuple[int, ...]] = {LARGE: (2, 3, 4), SMALL: (1, 2, 3, 4)}


class Trainer(NamedTuple):
    """Trains a batch, and waits until all batches have been given to the device."""

    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None


def run(device: Device, rows: Rows) -> None:
    sizes = DEPTHS if device.is_gpu else {TINY: (1, 2)}
    rounds = 3 if device.is_gpu else 1
    for size, depths in sizes.items():
        with rows.guarded(size.name), contextlib.ExitStack() as opened:
            trainers = {"unsplit": unsplit(device, size)}
            for depth in depths:
                trainers[f"d = {depth}"] = opened.enter_context(pipeline(device, size, depth))
            times = in_turn(device, trainers, size.batches, rounds)
            rows.figure(f"{size.name}: unsplit, s a batch", times["unsplit"])
            for depth in depths:
                ratio = times[f"d = {depth}"] / times["unsplit"]
                rows.figure(f"{size.name}: d = {depth} / unsplit", ratio)
    size = next(iter(sizes))
    with rows.guarded("updates"), pipeline(device, size, 1) as one:
        with pipeline(device, size, 1, updates=False) as none:
            times = in_turn(device, {"with": one, "without": none}, size.batches, rounds)
        rows.figure(f"{size.name}: with updates / none", times["with"] / times["without"])


def in_turn(
    device: Device, trainers: dict[str, Trainer], batches: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a batch of each, which are timed in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, (step, finish) in trainers.items():
            seconds[name].append(device.seconds_of(step, times=batches, finish=finish))
    return {name: statistics.median(values) for name, values in seconds.items()}


def batch_of(device: Device, size: Size) -> torch.Tensor:
    return torch.randn(M * size.rows, size.length, size.width, device=device.torch)


def unsplit(device: Device, size: Size) -> Trainer:
    """Plain gradient accumulation."""
    model, x = blocks(BLOCKS, size.width, device.torch), batch_of(device, size)
    optimizer = adamw_of(device, model.parameters(), fused=device.is_gpu)

    def step() -> None:
        optimizer.zero_grad()
        for part in x.chunk(M):
            (F.mse_loss(model(part), part) / M).backward()
        optimizer.step()

    return Trainer(step)


@contextlib.contextmanager
def pipeline(
    device: Device,
    size: Size,
    depth: int,
    *,
    clips: bool = False,
    updates: bool = True,
    **options: Any,
) -> Iterator[Trainer]:
    """Gives what trains; without updates its gradients are added to the next one's."""
    x = batch_of(device, size)
    with pd2.PipelineModule(
        blocks(BLOCKS, size.width, device.torch),
        F.mse_loss,
        num_stages=depth,
        num_microbatches=M,
        example_args=(x[: size.rows],),
        timeout=60.0,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(
            adamw_of(device, pipe.parameters()), max_grad_norm=1.0 if clips else None
        )

        def step() -> None:
            if not updates:
                with pipe.no_sync():
                    pipe.train_step(x, target=x)
                return
            pipe.train_step(x, target=x)
            opt.step()

        yield Trainer(step, pipe.flush)
        if not updates:  # what was added up belongs to a step
            pipe.train_step(x, target=x)
            opt.step()
