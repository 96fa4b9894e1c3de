"""Threads on one device train what the definition says, however late any stream is."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator

import torch

import pipedream2bw as pd2
from tests.references.oracle import LossFunction
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import sizes_for
from tests.samples.tied_models import TIED

from .device import Device
from .jitter import Jitter
from .section import Rows
from .training import Case, by_definition, by_threads, distance, repeatable, task_on

MODELS = {
    "MLP": TASKS["mlp"],
    "tied GPT": TIED["language model"],
    "BatchNorm": TASKS["batch norm"],
    "dropout": TASKS["drawing"],
}
WITHIN = 1e-6
WITHIN_HALF = 1e-3  # of a 16-bit forward: a sum in another order turns a rounding
NUM_BATCHES = 6
LAST = 6.0  # seconds before the section's end, for the training that is under way
MOST, MOST_ELSEWHERE = 30.0, 4.0  # seconds on a GPU, and elsewhere
SEEDS = (0,)


@dataclasses.dataclass
class Tally:
    """Of the runs of one row of the table."""

    runs: int = 0
    equal: int = 0
    farthest: float = 0.0
    worst: str = ""

    def add(self, apart: float, what: str) -> None:
        self.runs += 1
        self.equal += apart == 0
        if apart > self.farthest:
            self.farthest, self.worst = apart, what


def cases() -> Iterator[tuple[str, Case]]:
    """What matters most comes first."""
    options = (
        Case(clips=True),
        Case(precision="bf16"),
        Case(precision="fp16"),
        Case(accumulate=2),
        Case(steps_itself=True),
    )
    for depth, name in itertools.product((2, 3, 4), MODELS):
        yield name, Case(depth, depth + 1)
        if depth == 2:
            yield from ((name, each) for each in options if name == "MLP")
    for name, depth, schedule in itertools.product(MODELS, (2, 4, 3), pd2.schedule_names()):
        if schedule in ("2bw", "pipedream"):  # pipedream's delay is another for every stage
            continue
        for sizes in sizes_for(schedule, depth):
            yield name, Case(depth, sizes.num_microbatches, schedule, sizes.stages_per_rank)


def row_of(name: str, case: Case) -> str:
    kind = case.precision or "float32"
    kind += ", clipped" * case.clips + ", accumulated" * (case.accumulate > 1)
    kind += ", own step" * case.steps_itself
    return f"{name}, {kind}"


def seconds_of(device: Device, rows: Rows) -> float:
    """For trainings, of which there are more than time: others may need what is left over."""
    return min(rows.seconds_left - LAST, MOST if device.is_gpu else MOST_ELSEWHERE)


def run(device: Device, rows: Rows) -> None:
    end = time.monotonic() + seconds_of(device, rows)
    tallies: dict[str, Tally] = {}
    left_out = 0
    rows.note("jitter", f"every case without, and with seeds {SEEDS}")
    with repeatable():
        for name, case in cases():
            if time.monotonic() > end:
                left_out += 1
                continue
            tally = tallies.setdefault(row_of(name, case), Tally())
            with rows.guarded(f"{name}, {case}"):
                for seed, apart in differences(device, name, case):
                    tally.add(apart, f"{case}, jitter {seed}")
    for row, tally in tallies.items():
        within = WITHIN_HALF if "16" in row else WITHIN
        detail = f"farthest {tally.farthest:.1e} of {within:g}, {tally.equal} of {tally.runs} equal"
        rows.check(row, tally.farthest <= within, f"{detail} {tally.worst}".rstrip())
    rows.note("cases for which no time was left", str(left_out))


def in_float32(loss_fn: LossFunction) -> LossFunction:
    """A GPU's mse_loss has no backward for 16-bit outputs and a float32 target."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output.float(), target)

    return loss


def differences(device: Device, name: str, case: Case) -> Iterator[tuple[int | None, float]]:
    """Without jitter, then with; seeds and distances."""
    task = task_on(MODELS[name], device)
    if case.precision is not None:
        task = dataclasses.replace(task, loss_fn=in_float32(task.loss_fn))
    batches = task.batches([2 * case.num_microbatches] * NUM_BATCHES)
    want = by_definition(task, batches, case)
    yield None, distance(by_threads(device, task, batches, case), want)
    for seed in SEEDS:
        with Jitter(device, seed) as jitter:
            got = by_threads(device, task, batches, case, jitter=jitter, at_every_place=jitter.here)
        yield seed, distance(got, want)
