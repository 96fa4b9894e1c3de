"""Throughput of 2BW against torch.distributed.pipelining's 1F1B: same stages, AdamW in both.

2bw_fresh has error feedback, as the README advises.

    compute    2 processes, transformer blocks
    sleep      8 processes whose stages sleep: the schedule's own cost, free of the cores' number
    overhead   2 processes, stages of almost no work: the engine's cost per microbatch

    python benchmarks/against_torch.py [--only compute,sleep,overhead] [--rounds 7] [--smoke]
        [--json PATH]

All configurations of a setting live in one set of processes and take turns there, so that the
machine's noise hits all of them. Every figure is the median of the rounds' ratios. Before anything
is timed the losses of both are compared. README.md tells what exactly is timed.
"""

from __future__ import annotations

import dataclasses

from measuring.ranks import last_ranks_value, run_on_ranks
from measuring.report import Figure, add_only, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload
from measuring.trainers import (
    MIN_STEPS,
    Pipeline,
    TorchPipeline,
    Trainer,
    alternate_on_ranks,
    check_losses,
    check_training,
    steady_times,
    steps_lasting,
)

TORCH = "torch 1f1b"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared, with the targets by number of microbatches."""

    name: str
    num_stages: int
    workload: Workload
    targets: dict[int, float]
    schedules: tuple[str, ...] = ("2bw",)


SETTINGS = {
    "compute": Setting(
        "compute",
        2,
        Workload("transformer", rows=4, hidden=256, layers=2, sequence=64),
        {2: 1.45, 4: 1.21, 8: 1.09},
        ("2bw", "2bw_fresh"),
    ),
    "sleep": Setting(
        "sleep",
        8,
        Workload("sleep", rows=1, hidden=16, forward_seconds=5e-3, backward_seconds=10e-3),
        {8: 1.85, 16: 1.42},
    ),
    "overhead": Setting(
        "overhead", 2, Workload("scale", rows=1, hidden=16), {64: 0.5}, ("2bw", "1f1b")
    ),
}
SMOKE_SETTINGS = {
    "compute": Setting(
        "compute",
        2,
        Workload("transformer", rows=2, hidden=64, layers=1, sequence=16),
        {2: 0},
        ("2bw", "2bw_fresh"),
    ),
    "sleep": Setting(
        "sleep",
        3,
        Workload("sleep", rows=1, hidden=16, forward_seconds=1e-3, backward_seconds=2e-3),
        {3: 0},
    ),
    "overhead": Setting(
        "overhead", 2, Workload("scale", rows=1, hidden=16), {8: 0}, ("2bw", "1f1b")
    ),
}
MAX_OVER_LIMIT = 1.04
"""Sleeping stages: step time over the no-bubble limit m(F + B)."""


@dataclasses.dataclass
class Measured:
    """Seconds per step by configuration ("m=2 2bw") and round, in the steady state and overall."""

    steady: dict[str, list[float]]
    with_drain: dict[str, list[float]]
    steps: dict[str, int]
    forward_and_backward: tuple[float, float]


def measure(
    rank: int, world_size: int, setting: Setting, rounds: int, seconds: float
) -> Measured | None:
    """Runs on every rank; the last one, where the losses are, returns."""
    alone = setting.workload.forward_and_backward_seconds()
    trainers: dict[str, Trainer] = {}
    steps: dict[str, int] = {}
    first: dict[str, float] = {}
    for m in setting.targets:
        stock = TorchPipeline(setting.workload, rank, world_size, m)
        trainers[f"m={m} {TORCH}"] = stock
        checked = stock.train(3).losses
        for schedule in dict.fromkeys((*setting.schedules, "1f1b")):
            name = f"m={m} {schedule}"
            feedback = schedule == "2bw_fresh"
            pipeline = Pipeline(setting.workload, world_size, m, schedule, error_feedback=feedback)
            losses = pipeline.train(3).losses
            if losses:
                check_losses(f"{setting.name}, m={m}", schedule, losses, checked)
            if schedule in setting.schedules:
                trainers[name] = pipeline
            else:
                pipeline.close()
        for name in [name for name in trainers if name not in steps]:
            warm = trainers[name].train(MIN_STEPS)
            steps[name] = last_ranks_value(steps_lasting(seconds, warm) if warm.losses else 0)
            first[name] = checked[0] if checked else 0.0
    blocks = alternate_on_ranks(trainers, steps, rounds)
    if rank != world_size - 1:
        return None
    for name, measured in blocks.items():
        check_training(f"{setting.name}, {name}", first[name], measured[-1].losses[-1])
    return Measured(
        steady_times(blocks),
        {name: [block.seconds_per_step for block in blocks[name]] for name in blocks},
        steps,
        alone,
    )


def figures_of(setting: Setting, measured: Measured) -> list[Figure]:
    d, steady = setting.num_stages, measured.steady
    figures = []
    for m, target in setting.targets.items():
        torchs = steady[f"m={m} {TORCH}"]
        for schedule in setting.schedules:
            ours = steady[f"m={m} {schedule}"]
            if setting.name == "overhead":
                ratios = [mine / theirs for mine, theirs in zip(ours, torchs, strict=True)]
                measure = f"{schedule}, m={m}: time per microbatch over torch's"
                figures.append(Figure(setting.name, measure, ratios, at_most=target))
                continue
            ratios = [theirs / mine for mine, theirs in zip(ours, torchs, strict=True)]
            measure = f"{schedule}, m={m}: throughput over torch's 1F1B"
            ideal = (m + d - 1) / m
            figures.append(Figure(setting.name, measure, ratios, at_least=target, ideal=ideal))
            if setting.name == "sleep":
                work = setting.workload
                limit = m * (work.forward_seconds + work.backward_seconds)
                measure = f"{schedule}, m={m}: step time over m(F + B)"
                over = [mine / limit for mine in ours]
                figures.append(
                    Figure(setting.name, measure, over, at_most=MAX_OVER_LIMIT, ideal=1.0)
                )
    return figures


def times_of(setting: Setting, measured: Measured) -> list[Figure]:
    """Milliseconds per step, for information."""
    figures = []
    for name, seconds in measured.steady.items():
        both = (("steady state", seconds), ("with filling and drain", measured.with_drain[name]))
        for label, values in both:
            milliseconds = [1e3 * value for value in values]
            figures.append(Figure(setting.name, f"{name}: ms a step, {label}", milliseconds))
    return figures


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=7)
    add_only(parser, list(SETTINGS))
    options = parser.parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    where = machine()
    print(describe(where), flush=True)
    figures: list[Figure] = []
    times: list[Figure] = []
    notes = {}
    for name in options.only:
        setting = (SMOKE_SETTINGS if options.smoke else SETTINGS)[name]
        measured = run_on_ranks(setting.num_stages, measure, setting, rounds, seconds)[-1]
        assert isinstance(measured, Measured)
        forward, backward = (1e3 * value for value in measured.forward_and_backward)
        notes[name] = {
            "num_stages": setting.num_stages,
            "forward_ms": forward,
            "backward_ms": backward,
            "steps": measured.steps,
        }
        print(
            f"\n{name}: {setting.num_stages} processes, a microbatch's forward {forward:.2f} ms, "
            f"backward {backward:.2f} ms; losses equal torch's; {rounds} rounds of "
            f"{min(measured.steps.values())} to {max(measured.steps.values())} steps"
        )
        found, taken = figures_of(setting, measured), times_of(setting, measured)
        print_table(taken, judged=False)
        print_table(found, judged=not options.smoke)
        figures += found
        times += taken
    write_json(
        options.json, where, figures + times, rounds=rounds, smoke=options.smoke, settings=notes
    )


if __name__ == "__main__":
    main()
