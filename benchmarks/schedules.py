"""Step time of every schedule that the engine runs, against what the simulator predicts.

One process per rank, stages that sleep (F 20 ms, B 40 ms; where I and W are apart, 20 ms each),
free messages and updates in the prediction. With several stages a rank every stage takes as long.
Eight processes on two cores get in each other's way for about half a millisecond a microbatch,
whatever it lasts: hence times of that length.

    python benchmarks/schedules.py [--only 2bw,1f1b] [--rounds 5] [--smoke] [--json PATH]

Every round trains a few batches under each schedule, one pipeline after the other. Figures are the
medians of measured over predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from measuring.ranks import run_on_ranks
from measuring.report import Figure, add_only, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload
from measuring.trainers import MIN_STEPS, Pipeline

import pipedream2bw as pd2

WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=20e-3, backward_seconds=40e-3)
SMOKE_WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=1e-3, backward_seconds=2e-3)
NUM_RANKS = (4, 8)
TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str
    num_microbatches: int
    num_stages: int
    stages_per_rank: int = 1
    is_split: bool = False
    recompute: bool = False

    @property
    def label(self) -> str:
        chunks = f", v={self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"{self.schedule}, m={self.num_microbatches}{chunks}{again}"

    def on(self, workload: Workload) -> Workload:
        """The stages."""
        half = workload.backward_seconds / 2
        return dataclasses.replace(workload, weight_seconds=half) if self.is_split else workload

    def predicted(self, workload: Workload) -> float:
        """Seconds per batch."""
        return pd2.simulate(
            self.schedule,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            stages_per_rank=self.stages_per_rank,
            forward=workload.forward_seconds,
            backward=workload.backward_seconds,
            recompute=workload.forward_seconds if self.recompute else 0.0,
        ).period


def cases(p: int) -> list[Case]:
    """All schedules on ``p`` ranks."""
    return [
        Case("2bw", p, p),
        Case("2bw_eager", 2 * p, p),
        Case("pipedream", 1, p),
        Case("1f1b", p, p),
        Case("gpipe", p, p),
        Case("interleaved_2bw", 2 * p, 2 * p, 2),
        Case("interleaved", p, 2 * p, 2),
        Case("looped_bfs", p, 2 * p, 2),
        Case("chimera", p, p),
        Case("chimera_doubled", 2 * p, p),
        Case("2bw_split", p, p, is_split=True),
        Case("zero_bubble", 2 * p, p, is_split=True),
        Case("zero_bubble_2p", 2 * p, p, is_split=True),
        Case("interleaved_zero_bubble", p, 2 * p, 2, is_split=True),
        Case("2bw", p, p, recompute=True),
    ]


def named_cases(p: int, names: Sequence[str]) -> list[Case]:
    return [case for case in cases(p) if case.schedule in names]


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, names: Sequence[str]
) -> dict[str, list[float]] | None:
    """Runs on every rank; the last one returns the seconds per step of each round."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for case in named_cases(world_size, names):
            # A batch of one microbatch is at the last stage only when d - 1 more have begun.
            batches_late = world_size if case.num_microbatches == 1 else 1
            pipeline = Pipeline(
                case.on(workload),
                case.num_stages,
                case.num_microbatches,
                case.schedule,
                stages_per_rank=case.stages_per_rank,
                batches_late=batches_late,
                recompute=case.recompute,
            )
            block = pipeline.train(MIN_STEPS + 4 * batches_late)
            # One at a time: a pipeline that does nothing still has threads of gloo, each of which
            # looks around a hundred times a second.
            pipeline.close()
            if rank == world_size - 1:
                times.setdefault(case.label, []).append(block.steady_seconds_per_step)
    return times or None


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    add_only(parser, list(dict.fromkeys(case.schedule for case in cases(NUM_RANKS[0]))))
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    where = machine()
    print(describe(where), flush=True)
    figures: list[Figure] = []
    times: list[Figure] = []
    for p in (2,) if options.smoke else NUM_RANKS:
        measured = run_on_ranks(p, measure, workload, rounds, options.only)[-1]
        assert measured is not None
        for case in named_cases(p, options.only):
            predicted = case.predicted(workload)
            taken = measured[case.label]
            setting = f"{p} ranks"
            times.append(
                Figure(setting, f"{case.label}: ms a step", [1e3 * value for value in taken])
            )
            figures.append(
                Figure(
                    setting,
                    f"{case.label}: measured over predicted {1e3 * predicted:.1f} ms",
                    [value / predicted for value in taken],
                    at_least=1 - TOLERANCE,
                    at_most=1 + TOLERANCE,
                )
            )
    print_table(times, judged=False)
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures + times, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
