"""Frozen weights that are fetched when they are used: memory saved, and time.

    python benchmarks/streaming.py [--rounds 5] [--smoke] [--json PATH]

A pipeline of two stages, as threads, trains the norms between frozen linear layers, with
stream_weights() and without. How much lower the peak of the process's memory is, is held against
what the sizes of the layers say. Each measurement has a process of its own.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from measuring.report import Figure, arguments, describe, machine, report_ratios
from torch import nn

import pipedream2bw as pd2

AHEAD = 1


class Sizes(NamedTuple):
    layers: int
    width: int
    batches: int


class Measured(NamedTuple):
    """Bytes at the peak of the training, and which of them the layers should have saved."""

    peak: int
    saved: int
    seconds: float


def model_of(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(sizes.layers):
        layers += [nn.Linear(sizes.width, sizes.width).requires_grad_(False)]
        layers += [nn.LayerNorm(sizes.width)]
    return nn.Sequential(*layers)


def train(sizes: Sizes, is_streamed: bool) -> Measured:
    """In a process of its own."""
    torch.set_num_threads(1)
    x = torch.randn(32, sizes.width)
    with tempfile.TemporaryDirectory() as folder:
        model, extensions, saved = model_of(sizes), [], 0
        if is_streamed:
            streamed = pd2.stream_weights(model, folder, ahead=AHEAD, least_bytes=0)
            extensions = [streamed]
            saved = streamed.nbytes - 2 * streamed.most_bytes  # of two stages
        with pd2.PipelineModule(
            model,
            nn.functional.mse_loss,
            num_stages=2,
            num_microbatches=4,
            example_args=(x[:8],),
            split=[str(sizes.layers)],
        ) as pipe:
            sgd = torch.optim.SGD(pipe.parameters(), lr=1e-3)
            opt = pd2.PipelineOptimizer(sgd, extensions=extensions)
            seconds = float("inf")
            for number in range(sizes.batches):
                if number == 2:
                    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
                began = time.perf_counter()
                pipe.train_step(x, target=x)
                opt.step()
                pipe.flush()
                seconds = min(seconds, time.perf_counter() - began)
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return Measured(1024 * int(peak), saved, seconds)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    rounds, sizes = (1, Sizes(8, 256, 4)) if options.smoke else (options.rounds, Sizes(64, 1024, 8))
    where = machine()
    print(describe(where), flush=True)
    fall, seconds = [], {"plain": [], "streamed": []}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        plain, streamed = (
            concurrent.futures.ProcessPoolExecutor(1, spawn).submit(train, sizes, each).result()
            for each in (False, True)
        )
        fall.append((plain.peak - streamed.peak) / streamed.saved)
        seconds["plain"].append(1e3 * plain.seconds)
        seconds["streamed"].append(1e3 * streamed.seconds)
    setting = f"{sizes.layers} layers of width {sizes.width}"
    figures = [
        Figure(setting, "peak memory saved over what the layers' sizes say", fall),
        Figure(
            setting,
            "time of a batch over that without streaming",
            [b / a for a, b in zip(*seconds.values(), strict=True)],
        ),
    ]
    times = [Figure(setting, f"{name}: ms a batch", each) for name, each in seconds.items()]
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
