"""What recording costs: the step time inside ``pipe.timeline()`` against the same outside of it.

Two stage threads, transformer blocks of a few milliseconds a microbatch, 2bw with m = 8.

    python benchmarks/timeline.py [--rounds 60] [--smoke] [--json PATH]

Blocks of steps alternate on one pipeline, and so does which of a round's two is first; the figure
is the median of the rounds' ratios. Recording is an append under a lock for each action; what
`gather()` does afterwards is not timed.
"""

from __future__ import annotations

import contextlib

import torch
from measuring.report import Figure, arguments, describe, machine, report_ratios
from measuring.stages import Workload
from measuring.trainers import MIN_STEPS, Block, Pipeline, steps_lasting

NUM_STAGES = 2
NUM_MICROBATCHES = 8
MOST_OVERHEAD = 1.01
WORKLOAD = Workload("transformer", rows=2, hidden=256, layers=1, sequence=64)
SMOKE_WORKLOAD = Workload("transformer", rows=2, hidden=64, layers=1, sequence=16)


def train(pipeline: Pipeline, steps: int, *, recording: bool) -> Block:
    """A block of steps; if recorded, checks that every action of it was."""
    timeline = pipeline.pipe.timeline() if recording else contextlib.nullcontext()
    with timeline as recorded:
        block = pipeline.train(steps)
    if recorded is not None:
        expected = NUM_STAGES * steps * (2 * NUM_MICROBATCHES + 1)
        if len(recorded.rows) != expected:
            raise SystemExit(f"{len(recorded.rows)} actions were recorded, {expected} expected")
    return block


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=60).parse_args()
    rounds, seconds = (2, 0.05) if options.smoke else (options.rounds, 0.5)
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    print(f"{workload.times_in_words()}; {rounds} rounds\n", flush=True)
    pipeline = Pipeline(workload, NUM_STAGES, NUM_MICROBATCHES, "2bw")
    warm = pipeline.train(MIN_STEPS)
    steps = steps_lasting(seconds, warm)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for recording in (False, True) if number % 2 == 0 else (True, False):
            block = train(pipeline, steps, recording=recording)
            taken[recording].append(block.steady_seconds_per_step)
    pipeline.close()
    setting = f"m={NUM_MICROBATCHES}"
    times = [
        Figure(setting, f"{name}: ms a step", [1e3 * value for value in taken[recording]])
        for name, recording in (("not recorded", False), ("recorded", True))
    ]
    ratios = [on / off for off, on in zip(taken[False], taken[True], strict=True)]
    figure = Figure(
        setting, "step time recorded over not recorded", ratios, at_most=MOST_OVERHEAD, ideal=1.0
    )
    report_ratios(options, where, [figure], times, rounds=rounds)


if __name__ == "__main__":
    main()
