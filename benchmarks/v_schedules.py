"""Step time and activations of 2bw in a V: eight ranks with two stages each that sleep.

    python benchmarks/v_schedules.py [--rounds 5] [--smoke] [--json PATH]

All ranks are threads of one process. F, I and W of a stage take 20 ms each, or 20, 24 and 16, and
messages nothing more, or a twentieth of a rank's F + B. The step time is over the ideal m(F + B);
activations are what a rank's microbatches held at once, by the events of a run and the bytes that
their stages kept, over those of rank 0 of 2bw, which has two of the same stages in one. Sleeping
stages need little of a processor, so that other work beside them hardly counts; cores are kept
awake.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from measuring.cores import kept_awake
from measuring.delays import delayed_messages
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload
from measuring.trainers import MIN_STEPS, Pipeline
from torch import nn

import pipedream2bw as pd2

NUM_RANKS = 8
MICROBATCHES_PER_RANK = 2
NAMES = ("2bw_v_half",)
HOPS = (0.0, 0.05)
SLOWER = 1.03
"""A step over the ideal, or over what is simulated where that is more."""
MOST_HELD = {"2bw_v_half": 0.65}
"""Activations of the fullest rank over those of 2bw."""
MOST_UNEVEN = 1.1
"""Activations of the fullest rank over those of the emptiest."""


def workload_of(part: float, weight: float) -> Workload:
    """Stages whose F takes one part and whose B takes two, ``weight`` parts of that for W."""
    return Workload(
        "sleep",
        rows=1,
        hidden=16,
        forward_seconds=part,
        backward_seconds=2 * part,
        weight_seconds=weight * part,
    )


@dataclasses.dataclass(frozen=True)
class InPairs(Workload):
    """Two stages of the others in one."""

    def stage(self, index: int) -> nn.Module:
        return nn.Sequential(super().stage(2 * index), super().stage(2 * index + 1))


@contextlib.contextmanager
def messages_of(seconds: float) -> Iterator[None]:
    with delayed_messages(seconds) if seconds > 0 else contextlib.nullcontext():
        yield


def pipeline_of(name: str, workload: Workload, num_ranks: int) -> Pipeline:
    m = MICROBATCHES_PER_RANK * num_ranks
    if name == "2bw":
        return Pipeline(InPairs(**dataclasses.asdict(workload)), num_ranks, m, name, batches_late=1)
    return Pipeline(workload, 2 * num_ranks, m, name, stages_per_rank=2)


def held_by_rank(pipeline: Pipeline) -> list[float]:
    """The most bytes that the microbatches of each rank kept for their backwards at once.

    All stages count as the second one: what the first one reads is the user's and in no report, and
    the last one keeps what its loss needs.
    """
    with pipeline.pipe.timeline() as timeline:
        pipeline.train(MIN_STEPS)
    report = pipeline.pipe.memory_report()
    each = report[1].activations / report[1].most_in_flight
    most: dict[int, float] = {}
    now: dict[int, float] = {}
    moments = []
    for event in timeline.rows:
        if event.kind == "F":
            moments.append((event.start, event.rank, each))
        elif event.kind in ("B", "W"):
            moments.append((event.end, event.rank, -each))
    for _, rank, change in sorted(moments):
        now[rank] = now.get(rank, 0.0) + change
        most[rank] = max(most.get(rank, 0.0), now[rank])
    return [most[rank] for rank in sorted(most)]


def predicted(name: str, workload: Workload, num_ranks: int, hop: float) -> float:
    """Seconds of a batch, simulated."""
    return pd2.simulate(
        name,
        num_stages=2 * num_ranks,
        num_microbatches=MICROBATCHES_PER_RANK * num_ranks,
        stages_per_rank=2,
        forward=workload.forward_seconds,
        input_grad=workload.backward_seconds - workload.weight_seconds,
        weight_grad=workload.weight_seconds,
        latency=hop,
    ).period


def figures_of_times(part: float, num_ranks: int, rounds: int) -> list[Figure]:
    figures = []
    for name in NAMES:
        for weight in (1.0, 0.8):
            workload = workload_of(part, weight)
            ideal = MICROBATCHES_PER_RANK * num_ranks * 6 * part
            for share in HOPS:
                hop = share * 6 * part
                taken = []
                for _ in range(rounds):
                    with messages_of(hop):
                        pipeline = pipeline_of(name, workload, num_ranks)
                    taken.append(pipeline.train(MIN_STEPS).steady_seconds_per_step / ideal)
                    pipeline.close()
                simulated = predicted(name, workload, num_ranks, hop) / ideal
                figures.append(
                    Figure(
                        f"I {2 - weight:g}, W {weight:g}, hop {share:g} (F + B)",
                        f"{name}: step time over m(F + B)",
                        taken,
                        at_most=SLOWER * simulated,
                        ideal=simulated,
                    )
                )
    return figures


def figures_of_memory(part: float, num_ranks: int) -> list[Figure]:
    workload = workload_of(part, 1.0)
    held = {}
    for name in ("2bw", *NAMES):
        pipeline = pipeline_of(name, workload, num_ranks)
        held[name] = held_by_rank(pipeline)
        pipeline.close()
    fullest = max(held["2bw"])
    figures = [
        Figure(
            "activations",
            f"{name}: of each rank over 2bw's rank 0",
            [each / fullest for each in by_rank],
        )
        for name, by_rank in held.items()
    ]
    for name in NAMES:
        measure = f"{name}: of the fullest rank over 2bw's"
        share = max(held[name]) / fullest
        figures.append(Figure("activations", measure, [share], at_most=MOST_HELD[name]))
        measure = f"{name}: of the fullest rank over the emptiest"
        uneven = max(held[name]) / min(held[name])
        figures.append(Figure("activations", measure, [uneven], at_most=MOST_UNEVEN))
    return figures


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    num_ranks = 2 if options.smoke else NUM_RANKS
    rounds = 1 if options.smoke else options.rounds
    part = 1e-3 if options.smoke else 20e-3
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    with contextlib.nullcontext() if options.smoke else kept_awake():
        figures = figures_of_times(part, num_ranks, rounds)
    figures += figures_of_memory(part, num_ranks)
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
