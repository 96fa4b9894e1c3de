"""The unsplit model with accumulated gradients against threads of stages on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2

from .blocks import blocks
from .device import Device
from .section import Rows
from .training import adamw_of

M = 8
MOST_OF_ONE_STAGE = 1.03  # over the unsplit model
MOST_WITH_CLIPPING = 1.02  # over the same without
MOST_LAUNCHES = 30e-6  # seconds a microbatch, with graphs
BLOCKS = 6


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a microbatch, and how many batches are timed at once."""

    name: str
    rows: int
    length: int
    width: int
    batches: int


LARGE = Size("large", 4, 256, 1024, 3)
SMALL = Size("small", 2, 64, 256, 10)
TINY = Size("tiny", 1, 8, 64, 1)


def run(device: Device, rows: Rows) -> None:
    sizes, depths, rounds = (
        ((LARGE, SMALL), (1, 2, 3, 4), 5) if device.is_gpu else ((TINY,), (1, 2), 1)
    )
    for size in sizes:
        with contextlib.ExitStack() as opened:
            steps = {"unsplit": unsplit(device, size)}
            for depth in depths:
                steps[f"d = {depth}"] = opened.enter_context(pipeline(device, size, depth))
            steps["clipped"] = opened.enter_context(pipeline(device, size, depths[0], clips=True))
            times = in_turn(device, steps, size.batches, rounds)
        baseline, one = times["unsplit"], times["d = 1"]
        rows.figure(f"{size.name}: unsplit, s a batch", baseline)
        for depth in depths:
            limit = MOST_OF_ONE_STAGE if depth == 1 and size is not SMALL else None
            ratio = times[f"d = {depth}"] / baseline
            rows.figure(f"{size.name}: d = {depth} / unsplit", ratio, at_most=limit)
        limit = None if size is SMALL else MOST_WITH_CLIPPING
        rows.figure(f"{size.name}: clipping / none", times["clipped"] / one, at_most=limit)
        with pipeline(device, size, depths[0], updates=False) as without:
            alone = in_turn(device, {"no update": without}, size.batches, rounds)["no update"]
        rows.figure(f"{size.name}: with updates / none", one / alone)
    launches(device, rows)


def in_turn(
    device: Device, steps: dict[str, Callable[[], None]], batches: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a batch of each, which are timed in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(device.seconds_of(step, times=batches))
    return {name: statistics.median(values) for name, values in seconds.items()}


def batch_of(device: Device, size: Size) -> torch.Tensor:
    return torch.randn(M * size.rows, size.length, size.width, device=device.torch)


def unsplit(device: Device, size: Size) -> Callable[[], None]:
    """Plain gradient accumulation."""
    model, x = blocks(BLOCKS, size.width, device.torch), batch_of(device, size)
    optimizer = adamw_of(device, model.parameters(), fused=device.is_gpu)

    def step() -> None:
        optimizer.zero_grad()
        for part in x.chunk(M):
            (F.mse_loss(model(part), part) / M).backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def pipeline(
    device: Device,
    size: Size,
    depth: int,
    *,
    clips: bool = False,
    updates: bool = True,
    **options: Any,
) -> Iterator[Callable[[], None]]:
    """Gives what trains a batch; without updates its gradients are added to the next one's."""
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

        yield step
        if not updates:  # what was added up belongs to a step
            pipe.train_step(x, target=x)
            opt.step()


def launches(device: Device, rows: Rows) -> None:
    """What a microbatch takes beside the device's own work, with and without CUDA graphs."""
    option = next(
        (n for n in inspect.signature(pd2.PipelineModule).parameters if "graph" in n), None
    )
    busy = replayed(device, TINY) if device.is_gpu else 0.0
    choices: list[dict[str, Any]] = [{}, {option: True}] if option and device.is_gpu else [{}]
    for options in choices:
        with pipeline(device, TINY, 1, **options) as step:
            taken = in_turn(device, {"": step}, 5, 5 if device.is_gpu else 1)[""] / M
        limit = MOST_LAUNCHES if options else None
        what = "with graphs" if options else "without graphs"
        rows.figure(f"{what}: launching a microbatch of six blocks, s", taken - busy, at_most=limit)
    if option is None:
        rows.absent("with graphs", "PipelineModule has no option of that name")


def replayed(device: Device, size: Size) -> float:
    """Seconds of a microbatch's forward and backward alone, recorded once and repeated."""
    model, x = blocks(BLOCKS, size.width, device.torch), batch_of(device, size)[: size.rows]

    def work() -> None:
        F.mse_loss(model(x), x).backward()

    stream = device.new_stream()
    with device.on(stream):
        for _ in range(3):
            work()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return device.seconds_of(graph.replay, times=100)
