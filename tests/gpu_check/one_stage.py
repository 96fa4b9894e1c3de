"""What a pipeline of one stage costs over the unsplit model: the engine itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from .blocks import blocks
from .device import Device
from .section import Rows
from .speed import BLOCKS, LARGE, TINY, M, Size, batch_of, in_turn, pipeline, unsplit

MOST_OF_ONE_STAGE = 1.03  # over the unsplit model
MOST_WITH_CLIPPING = 1.02  # over the same without
MOST_LAUNCHES = 30e-6  # seconds a microbatch, with graphs


def run(device: Device, rows: Rows) -> None:
    size, rounds = (LARGE, 5) if device.is_gpu else (TINY, 1)
    with (
        rows.guarded("one stage"),
        pipeline(device, size, 1) as one,
        pipeline(device, size, 1, clips=True) as clipped,
    ):
        trainers = {"unsplit": unsplit(device, size), "one": one, "clipped": clipped}
        times = in_turn(device, trainers, size.batches, rounds)
        rows.figure("unsplit, s a batch", times["unsplit"])
        ratio = times["one"] / times["unsplit"]
        rows.figure("d = 1 / unsplit", ratio, at_most=MOST_OF_ONE_STAGE)
        ratio = times["clipped"] / times["one"]
        rows.figure("clipping / none", ratio, at_most=MOST_WITH_CLIPPING)
    with rows.guarded("launches"):
        launches(device, rows)


def launches(device: Device, rows: Rows) -> None:
    """What a microbatch takes beside the device's own work, with and without CUDA graphs."""
    busy = replayed(device, TINY) if device.is_gpu else 0.0
    choices: list[dict[str, Any]] = [{}, {"graphs": True}] if device.is_gpu else [{}]
    for options in choices:
        what = "with graphs" if options else "without graphs"
        name = f"{what}: launching a microbatch of six blocks, s"
        if options and not device.has_kernels:
            rows.absent(name, "the package is built without")
            continue
        with rows.guarded(name), pipeline(device, TINY, 1, **options) as one:
            batches, rounds = (40, 5) if device.is_gpu else (2, 1)
            taken = in_turn(device, {"": one}, batches, rounds)[""] / M
            rows.figure(name, taken - busy, at_most=MOST_LAUNCHES if options else None)


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
