"""Throughput of two stage threads in one process against the unsplit model on one core.

Both sides use the same transformer blocks, microbatches and AdamW; each stage computes on one
thread, so 2.0 is the ideal.

    python benchmarks/threads.py [--rounds 7] [--smoke] [--json PATH]

One block of steps of each in turn; the figure is the median of the rounds' ratios. Before anything
is timed the losses of both are compared.
"""

from __future__ import annotations

import torch
from measuring.report import Figure, arguments, describe, machine, report_ratios
from measuring.stages import Workload
from measuring.trainers import (
    MIN_STEPS,
    Pipeline,
    Trainer,
    Unsplit,
    alternate,
    check_losses,
    check_training,
    steps_lasting,
)

NUM_STAGES = 2
TARGET = 1.85
WORKLOAD = Workload("transformer", rows=4, hidden=256, layers=2, sequence=64)
SMOKE_WORKLOAD = Workload("transformer", rows=2, hidden=64, layers=1, sequence=16)
MICROBATCHES = (4, 8)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=7).parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 2.0)
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    print(f"{workload.times_in_words()}; {rounds} rounds\n", flush=True)
    figures: list[Figure] = []
    times: list[Figure] = []
    for m in MICROBATCHES:
        unsplit = Unsplit(workload, NUM_STAGES, m)
        stock = unsplit.train(MIN_STEPS)
        for schedule in ("1f1b", "2bw"):
            pipeline = Pipeline(workload, NUM_STAGES, m, schedule)
            warm = pipeline.train(MIN_STEPS)
            check_losses(f"m={m}", schedule, warm.losses, stock.losses)
            if schedule != "2bw":
                pipeline.close()
        trainers: dict[str, Trainer] = {"unsplit": unsplit, "2bw": pipeline}
        steps = {
            "unsplit": steps_lasting(seconds, stock),
            "2bw": steps_lasting(seconds, warm),
        }
        blocks = alternate(trainers, steps, rounds)
        pipeline.close()
        for name, measured in blocks.items():
            check_training(f"{name}, m={m}", stock.losses[0], measured[-1].losses[-1])
        taken = {
            name: [block.steady_seconds_per_step for block in blocks[name]] for name in trainers
        }
        times += [
            Figure(f"m={m}", f"{name}: ms a step", [1e3 * value for value in taken[name]])
            for name in trainers
        ]
        ratios = [one / two for one, two in zip(taken["unsplit"], taken["2bw"], strict=True)]
        measure = "2bw on two threads: throughput over the unsplit model's"
        figures.append(Figure(f"m={m}", measure, ratios, at_least=TARGET, ideal=2.0))
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
