"""What the replicas' order of additions costs: step time with ordered sums over an all-reduce's.

One stage that sleeps, with 16 MiB of gradients, m = 4, and 2 or 4 replicas of it, in a process
each. Under 2bw the next batch hides the sum, under 1f1b nothing does.

    python benchmarks/replica_sums.py [--rounds 9] [--smoke] [--json PATH]

Both train in the same processes, in turns. Figures are the medians of the rounds' ratios.
"""

from __future__ import annotations

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

MOST_COST = 1.03
M = 4
WORKLOAD = Workload("sleep", rows=1, hidden=4 << 20, forward_seconds=10e-3, backward_seconds=20e-3)
SMOKE_WORKLOAD = Workload("sleep", rows=1, hidden=64, forward_seconds=1e-3, backward_seconds=2e-3)
SCHEDULES = ("2bw", "1f1b")


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, seconds: float
) -> dict[str, list[float]] | None:
    """Runs on every rank, each a replica; the last one returns seconds per step of each round."""
    trainers: dict[str, Trainer] = {
        f"{schedule}, {sums}": Pipeline(
            workload, 1, M, schedule, width=world_size, replica_sums=sums
        )
        for schedule in SCHEDULES
        for sums in ("ordered", "all_reduce")
    }
    steps: dict[str, int] = {}
    for label, trainer in trainers.items():
        warm = trainer.train(MIN_STEPS)
        steps[label] = last_ranks_value(steps_lasting(seconds, warm))
    measured = steady_times(alternate_on_ranks(trainers, steps, rounds))
    return measured if rank == world_size - 1 else None


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=9).parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    where = machine()
    print(describe(where), flush=True)
    times, figures = [], []
    for width in (2,) if options.smoke else (2, 4):
        measured = run_on_ranks(width, measure, workload, rounds, seconds)[-1]
        assert measured is not None
        setting = f"{width} replicas"
        times += [
            Figure(setting, f"{label}: ms a step", [1e3 * value for value in values])
            for label, values in measured.items()
        ]
        for schedule in SCHEDULES:
            both = zip(
                *(measured[f"{schedule}, {s}"] for s in ("ordered", "all_reduce")), strict=True
            )
            ratios = [ordered / reduced for ordered, reduced in both]
            most = MOST_COST if schedule == "2bw" else None
            figures.append(
                Figure(setting, f"{schedule}: ordered over all-reduce", ratios, at_most=most)
            )
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
