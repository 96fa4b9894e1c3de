"""What replicas' sums and steps cost: step time over that with an all-reduce and whole steps.

One stage, m = 4, and 2 or 4 replicas of it, in a process each. Under 2bw the next batch hides
the update, under 1f1b nothing does. Sums in the replicas' order: a stage that sleeps, with 16 MiB
of gradients. Optimizer state that replicas share out: blocks with 48 MiB, in float32.

    python benchmarks/replica_sums.py [--rounds 9] [--smoke] [--json PATH]

Those that sleep train in the same processes, in turns. Those that compute start anew in every
round, one pipeline at a time: what a second one leaves in the caches and in malloc's memory changes
what the first one's sums and steps cost. Figures are the medians of the rounds' ratios. Processors'
time is that of all ranks and threads: beside others' work, and on fewer cores than ranks, it says
what a step costs where the time says how busy the machine was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from measuring.ranks import last_ranks_value, run_on_ranks
from measuring.report import Figure, arguments, describe, machine, report_ratios
from measuring.stages import Workload
from measuring.trainers import (
    MIN_STEPS,
    Pipeline,
    Trainer,
    alternate_on_ranks,
    steady_times,
    steps_lasting,
)

MOST_COST, MOST_SHARED = 1.03, 1.0
M = 4
WORKLOAD = Workload("sleep", rows=1, hidden=4 << 20, forward_seconds=10e-3, backward_seconds=20e-3)
SMOKE_WORKLOAD = Workload("sleep", rows=1, hidden=64, forward_seconds=1e-3, backward_seconds=2e-3)
BLOCKS = Workload("transformer", rows=1, hidden=512, layers=4, sequence=4)
SMOKE_BLOCKS = Workload("transformer", rows=1, hidden=64, layers=1, sequence=4)
SCHEDULES = ("2bw", "1f1b")
REDUCED = "all_reduce"


class Measured(NamedTuple):
    """Seconds per step of each round, by label: as clocks say, and of all ranks' processors."""

    time: dict[str, list[float]]
    cpu: dict[str, list[float]]


def measure(
    rank: int,
    world_size: int,
    workload: Workload,
    kinds: Sequence[tuple[str, str]],
    rounds: int,
    seconds: float,
) -> Measured | None:
    """Runs on every rank, each a replica; the last one returns what was measured.

    Args:
        kinds: schedules, each with its way of sums and steps.
    """
    trainers: dict[str, Trainer] = {
        f"{schedule}, {how}": Pipeline(
            workload,
            1,
            M,
            schedule,
            width=world_size,
            replica_sums=REDUCED if how == REDUCED else "ordered",
            shard_state=how == "shared",
        )
        for schedule, how in kinds
    }
    steps: dict[str, int] = {}
    for label, trainer in trainers.items():
        warm = trainer.train(MIN_STEPS)
        steps[label] = last_ranks_value(steps_lasting(seconds, warm))
    blocks = alternate_on_ranks(trainers, steps, rounds)
    cpu = torch.tensor([[block.cpu_seconds for block in of_label] for of_label in blocks.values()])
    dist.all_reduce(cpu)
    if rank < world_size - 1:
        return None
    per_step = {
        label: (row / steps[label]).tolist() for label, row in zip(blocks, cpu, strict=True)
    }
    return Measured(steady_times(blocks), per_step)


def in_turns(
    width: int, workload: Workload, other: str, rounds: int, seconds: float, *, alone: bool
) -> Measured:
    """Measures both schedules, each with an all-reduce and whole steps and with the other way.

    Args:
        alone: each starts anew in every round.
    """
    kinds = [(schedule, how) for schedule in SCHEDULES for how in (other, REDUCED)]
    sets = [[kind] for kind in kinds] if alone else [kinds]
    found = Measured({}, {})
    for _ in range(rounds if alone else 1):
        for together in sets:
            times = 1 if alone else rounds
            here = run_on_ranks(width, measure, workload, together, times, seconds)[-1]
            for measured, more in zip(found, here, strict=True):
                for label, values in more.items():
                    measured.setdefault(label, []).extend(values)
    return found


def ratios_of(measured: dict[str, list[float]], mine: str, reduced: str) -> list[float]:
    """The rounds' ratios of two labels."""
    return [a / b for a, b in zip(measured[mine], measured[reduced], strict=True)]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=9).parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    sleeping = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    blocks = SMOKE_BLOCKS if options.smoke else BLOCKS
    where = machine()
    print(describe(where), flush=True)
    times, figures = [], []
    for width, other in itertools.product((2,) if options.smoke else (2, 4), ("ordered", "shared")):
        workload, most = (sleeping, MOST_COST) if other == "ordered" else (blocks, MOST_SHARED)
        alone = other == "shared"
        lasting = 3 * seconds if alone else seconds  # the first step has to find its memory
        measured = in_turns(width, workload, other, rounds, lasting, alone=alone)
        setting = f"{width} replicas"
        times += [
            Figure(setting, f"{label}: {what} a step", [1e3 * value for value in values])
            for what, by_label in (("ms", measured.time), ("processors' ms", measured.cpu))
            for label, values in by_label.items()
        ]
        for schedule in SCHEDULES:
            bar = most if schedule == "2bw" or other == "shared" else None
            name = f"{schedule}: {other} over all-reduce"
            both = f"{schedule}, {other}", f"{schedule}, {REDUCED}"
            figures.append(Figure(setting, name, ratios_of(measured.time, *both), at_most=bar))
            if other == "shared":
                figures.append(
                    Figure(setting, f"{name}, processors", ratios_of(measured.cpu, *both))
                )
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
