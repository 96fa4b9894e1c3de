"""Throughput of several schedules on one model, measured side by side in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import pipedream2bw as pd2

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
SCHEDULES = ("2bw_fresh", "1f1b", "gpipe")
NUM_RECORDED = 3  # batches in the timeline


@dataclass
class Comparison:
    """Measured ``speeds``: batches per second by schedule and round. ``events``: on rank 0 only."""

    speeds: dict[str, list[float]]
    events: dict[str, list[pd2.Event]]
    num_stages: int
    num_microbatches: int

    def table(self, tokens_per_batch: int) -> str:
        """Formats medians over the rounds as a table, and the ratios of these medians."""
        d, m = self.num_stages, self.num_microbatches
        rounds = len(next(iter(self.speeds.values())))
        bound = (m + d - 1) / m
        lines = [
            f"throughput, {d} stages, {m} microbatches, median of {rounds} alternating rounds",
            "",
            "| schedule | tokens/s | lowest - highest | against 1f1b | no-bubble bound |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, speeds in self.speeds.items():
            ratio = statistics.median(speeds) / statistics.median(self.speeds["1f1b"])
            tokens = [tokens_per_batch * speed for speed in speeds]
            lines.append(
                f"| {name} | {statistics.median(tokens):,.0f} | {min(tokens):,.0f} - "
                f"{max(tokens):,.0f} | {ratio:.2f} | "
                f"{bound if '2bw' in name else 1:.2f} |"
            )
        return "\n".join(lines)


def compare(
    build: Callable[[str], tuple[pd2.PipelineModule, pd2.PipelineOptimizer]],
    batches: Batches,
    *,
    seconds: float,
    num_rounds: int = 5,
    schedules: Sequence[str] = SCHEDULES,
) -> Comparison:
    """Runs the schedules in turn, ``num_rounds`` times each, in about ``seconds`` altogether.

    Taking turns exposes all schedules to the same load of the machine. Every rank calls it.
    ``build(schedule)`` returns a pipeline over a fresh copy of the model, and its optimizer.
    """
    built = {name: build(name) for name in schedules}
    slowest = max(_seconds_per_batch(*built[name], batches, 3) for name in schedules)
    share = seconds / num_rounds / len(schedules)
    num_steps = int(agreed(max(2, share / slowest - 3)))
    speeds: dict[str, list[float]] = {name: [] for name in schedules}
    start = time.perf_counter()
    for done in range(num_rounds):
        # If the machine has become slower, do fewer rounds.
        if done >= 2 and agreed(time.perf_counter() - start) > seconds:
            break
        for name in schedules:
            speeds[name].append(1 / _seconds_per_batch(*built[name], batches, num_steps))
    events = {name: _record(*built[name], batches) for name in schedules}
    first, _ = built[schedules[0]]
    comparison = Comparison(speeds, events, first.num_stages, first.num_microbatches)
    for pipe, _ in built.values():
        pipe.close()
    return comparison


def agreed(value: float) -> float:
    """Returns rank 0's value on every rank."""
    box = torch.tensor([value], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(box, src=0)
    return box.item()


def _seconds_per_batch(
    pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, batches: Batches, num_steps: int
) -> float:
    """Measures the steady state: the time between two losses, each read one batch late.

    Two batches run before the first loss and one after the second, so that no schedule gains or
    loses by an empty pipeline at the ends.
    """
    times: list[float] = []
    late: pd2.Loss | None = None
    for _ in range(num_steps + 3):
        loss = train_one_batch(pipe, optimizer, batches)
        if late is not None:
            late.item()
            times.append(time.perf_counter())
        late = loss
    pipe.flush()
    return (times[-1] - times[1]) / (len(times) - 2)


def _record(
    pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, batches: Batches
) -> list[pd2.Event]:
    for _ in range(2):
        train_one_batch(pipe, optimizer, batches)
    return record_timeline(pipe, optimizer, batches)


def record_timeline(
    pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, batches: Batches
) -> list[pd2.Event]:
    """Trains a few more batches and returns what all stages did meanwhile (on rank 0)."""
    with pipe.timeline() as timeline:
        for _ in range(NUM_RECORDED):
            train_one_batch(pipe, optimizer, batches)
    return timeline.gather()


def train_one_batch(
    pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, batches: Batches
) -> pd2.Loss:
    tokens, target = next(batches)
    loss = pipe.train_step(tokens, target=target)
    optimizer.step()
    return loss
