"""What updates cost: step time with a long update and with clipping by norm over that without.

8 processes, stages that sleep, m = 8. The update sleeps for as long as a forward takes, on every
stage: as an optimizer's step, or replicas' all-reduce, would that need no processor here.

    python benchmarks/updates.py [--rounds 5] [--smoke] [--json PATH]

2bw here and 1F1B of torch.distributed.pipelining, all in one set of processes, in turns. Figures
are the medians of the rounds' ratios.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import torch
from measuring.ranks import last_ranks_value, run_on_ranks
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload, sleep_until
from measuring.trainers import (
    LEARNING_RATE,
    MIN_STEPS,
    MakeOptimizer,
    Pipeline,
    TorchPipeline,
    Trainer,
    adamw,
    alternate_on_ranks,
    steady_times,
    steps_lasting,
)
from torch import nn

MOST_COST = 1.03
MAX_NORM = 1e-3  # always clips
WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=10e-3, backward_seconds=20e-3)
SMOKE_WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=1e-3, backward_seconds=2e-3)


class LongStep(torch.optim.AdamW):
    """Its step takes as long as the given time, without a processor's."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        end = time.perf_counter() + self.seconds
        result = super().step()
        sleep_until(end)
        return result


def long_step(seconds: float) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = LongStep(parameters, lr=LEARNING_RATE)
        optimizer.seconds = seconds
        return optimizer

    return make


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    is_long: bool
    clips: bool


CASES = (
    Case("plain", False, False),
    Case("clipping", False, True),
    Case("an update as long as a forward", True, False),
    Case("both", True, True),
)


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, seconds: float
) -> dict[str, list[float]] | None:
    """Runs on every rank; the last one returns the seconds per step of each round."""
    trainers: dict[str, Trainer] = {}
    steps: dict[str, int] = {}
    for case in CASES:
        make = long_step(workload.forward_seconds) if case.is_long else adamw
        norm = MAX_NORM if case.clips else None
        ours = Pipeline(
            workload, world_size, world_size, "2bw", make_optimizer=make, max_grad_norm=norm
        )
        theirs = TorchPipeline(
            workload, rank, world_size, world_size, make_optimizer=make, max_grad_norm=norm
        )
        trainers |= {f"2bw, {case.label}": ours, f"torch 1F1B, {case.label}": theirs}
    for label, trainer in trainers.items():
        warm = trainer.train(MIN_STEPS)
        steps[label] = last_ranks_value(steps_lasting(seconds, warm) if warm.losses else 0)
    measured = steady_times(alternate_on_ranks(trainers, steps, rounds))
    return measured if rank == world_size - 1 else None


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    workload, p = (SMOKE_WORKLOAD, 2) if options.smoke else (WORKLOAD, 8)
    where = machine()
    print(describe(where), flush=True)
    measured = run_on_ranks(p, measure, workload, rounds, seconds)[-1]
    assert measured is not None
    setting = f"{p} ranks"
    times = [
        Figure(setting, f"{label}: ms a step", [1e3 * value for value in values])
        for label, values in measured.items()
    ]
    figures = []
    for name, at_most in (("2bw", MOST_COST), ("torch 1F1B", None)):
        plain = measured[f"{name}, {CASES[0].label}"]
        for case in CASES[1:]:
            taken = measured[f"{name}, {case.label}"]
            ratios = [value / base for value, base in zip(taken, plain, strict=True)]
            figures.append(
                Figure(setting, f"{name}: {case.label} over plain", ratios, at_most=at_most)
            )
    print_table(times, judged=False)
    print()
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures + times, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
