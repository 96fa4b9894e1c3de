"""Step time and memory of 2bw_fresh over those of 2bw: stages and updates that sleep.

    python benchmarks/fresh_forwards.py [--rounds 5] [--smoke] [--json PATH]

Eight stages are threads of one process. A forward takes 5 ms and a backward 10 ms, a slot. An
update takes so many slots less a tenth of one, beside them. Fresh forwards wait for it, unless
enough forwards of a batch are late. Where gradients are clipped, updates wait for all stages. Both
schedules alternate in one run, on cores that are kept awake.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import torch
from measuring.cores import kept_awake
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload, sleep_until
from measuring.trainers import MIN_STEPS, Pipeline

import pipedream2bw as pd2

NUM_STAGES = 8
MOST = 1.02
"""A step of 2bw_fresh over one of 2bw."""
FEWER = 1
"""Slots less than an update takes, which must show."""


class SleepingUpdate(pd2.Extension):
    """Makes every update last, in its own thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def acts_in(self, update: object) -> bool:
        return True

    def before_update(self, update: object, slot: int) -> None:
        sleep_until(time.perf_counter() + self.seconds)


def seconds_per_step(
    workload: Workload, m: int, update_slots: int | None, seconds: float, *, clips: bool
) -> float:
    pipeline = Pipeline(
        workload,
        NUM_STAGES,
        m,
        "2bw",
        update_slots=update_slots,
        max_grad_norm=1.0 if clips else None,
        extensions=[SleepingUpdate(seconds)],
    )
    taken = pipeline.train(MIN_STEPS).steady_seconds_per_step
    pipeline.close()
    return taken


def figures_of_times(slot: float, rounds: int) -> list[Figure]:
    figures = []
    workload = Workload(
        "sleep", rows=1, hidden=16, forward_seconds=slot / 3, backward_seconds=2 * slot / 3
    )
    for slots, m, clips in itertools.product((1, 2), (16, 32), (False, True)):
        seconds = (slots - 0.1) * slot
        taken: dict[int | None, list[float]] = {None: [], slots: []}
        for _ in range(rounds):
            for update_slots, times in taken.items():
                times.append(seconds_per_step(workload, m, update_slots, seconds, clips=clips))
        ratios = [fresh / late for fresh, late in zip(taken[slots], taken[None], strict=True)]
        where = f"m = {m}, update of {slots - 0.1:g} slots{', clipped' * clips}"
        figures.append(Figure(where, "2bw_fresh: step over 2bw's", ratios, at_most=MOST))
    seconds = (1 + FEWER - 0.1) * slot
    ratios = [
        seconds_per_step(workload, 16, 1, seconds, clips=False)
        / seconds_per_step(workload, 16, None, seconds, clips=False)
        for _ in range(rounds)
    ]
    where = f"m = 16, update of {1 + FEWER - 0.1:g} slots"
    figures.append(Figure(where, "update_slots=1: step over 2bw's", ratios))
    return figures


def figures_of_memory() -> list[Figure]:
    """With stages that compute, and are as wide as a report needs to see them."""
    totals = {}
    for update_slots in (None, 1):
        pipeline = Pipeline(
            Workload("sleep", rows=2, hidden=256),
            NUM_STAGES,
            2 * NUM_STAGES,
            "2bw",
            update_slots=update_slots,
        )
        pipeline.train(MIN_STEPS)
        totals[update_slots] = [each.total for each in pipeline.pipe.memory_report().values()]
        pipeline.close()
    ratios = [fresh / late for fresh, late in zip(totals[1], totals[None], strict=True)]
    figure = Figure("memory_report()", "2bw_fresh: of each stage over 2bw's", ratios, at_most=1.0)
    return [figure]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    rounds = 1 if options.smoke else options.rounds
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    with contextlib.nullcontext() if options.smoke else kept_awake():
        figures = figures_of_times(1e-3 if options.smoke else 15e-3, rounds)
    figures += figures_of_memory()
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
