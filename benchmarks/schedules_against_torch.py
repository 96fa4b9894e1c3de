"""Step time of torch.distributed.pipelining's schedules and of the same ones here, and of 2BW.

    sleep      8 processes, stages that sleep, for the input's and the weight's gradient apart
    compute    2 processes, transformer blocks
    latency    8 processes, stages that sleep, messages that take a tenth of F + B

    python benchmarks/schedules_against_torch.py [--only sleep,compute,latency] [--rounds 5]
        [--smoke] [--json PATH]

All configurations of a setting live in one set of processes and take turns there. Every figure is
the median of the rounds' ratios. Before anything is timed the losses are compared; for the sleeping
stages it is measured how long F, I, W and B take in either library, and cores are kept awake.
README.md tells what is timed.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from measuring.cores import kept_awake
from measuring.delays import delayed_messages
from measuring.ranks import known_to_all, run_on_ranks
from measuring.report import Figure, add_only, arguments, describe, machine, print_table, write_json
from measuring.schedule_figures import (
    ASYNCHRONOUS,
    CHUNKS,
    PAIRS,
    WITH_LATENCY,
    Measured,
    Pair,
    Setting,
    figures_of_kinds,
    figures_of_latency,
    figures_of_pairs,
    seconds_of,
)
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

import pipedream2bw as pd2

SLEEP = Workload(
    "sleep",
    rows=1,
    hidden=16,
    forward_seconds=5e-3,
    backward_seconds=10e-3,
    weight_seconds=5e-3,
)
# Long enough that what eight processes on two cores cost each other, up to a millisecond a
# microbatch, is not what is measured.
LONG_SLEEP = dataclasses.replace(
    SLEEP, forward_seconds=20e-3, backward_seconds=40e-3, weight_seconds=20e-3
)
SMOKE_SLEEP = dataclasses.replace(
    SLEEP, forward_seconds=1e-3, backward_seconds=2e-3, weight_seconds=1e-3
)
SETTINGS = {
    "sleep": Setting("sleep", 8, 8, SLEEP, over_one_stage_a_rank=1.85),
    "compute": Setting(
        "compute", 2, 4, Workload("transformer", rows=4, hidden=256, layers=2, sequence=64)
    ),
    "latency": Setting("latency", 8, 16, LONG_SLEEP, latency=0.1),
}
SMOKE_SETTINGS = {
    "sleep": Setting("sleep", 2, 4, SMOKE_SLEEP),
    "compute": Setting(
        "compute", 2, 4, Workload("transformer", rows=2, hidden=64, layers=2, sequence=16)
    ),
    "latency": Setting("latency", 3, 5, SMOKE_SLEEP, latency=0.1),
}


def csv_of(trainer: TorchPipeline) -> str:
    """The order of torch's schedule: placement, I, W and B."""
    text = io.StringIO()
    csv.writer(text).writerows(trainer.schedule.pipeline_order.values())
    return text.getvalue()


def kinds_of_torch(trainer: TorchPipeline) -> dict[str, list[float]]:
    """Seconds of every action of a few steps, without what is waited for."""
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(function: Callable[..., Any], kind_of: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            taken[kind_of(**kwargs)].append(time.perf_counter() - start)
            return result

        return call

    def kind_of_backward(full_backward: bool = True, **_: Any) -> str:
        return "B" if full_backward else "I"

    kinds: dict[str, Callable[..., str]] = {
        "forward_one_chunk": lambda **_: "F",
        "backward_one_chunk": kind_of_backward,
        "backward_weight_one_chunk": lambda **_: "W",
    }
    # torch computes nothing in the first stage's I and all in its W.
    for stage in (stage for stage in trainer.stages if not stage.is_first):
        for name, kind_of in kinds.items():
            setattr(stage, name, timed(getattr(stage, name), kind_of))
    trainer.train(MIN_STEPS)
    for stage in trainer.stages:
        for name in kinds:
            vars(stage).pop(name, None)
    return taken


def kinds_of_ours(trainer: Pipeline) -> dict[str, list[float]]:
    with trainer.pipe.timeline() as timeline:
        trainer.train(MIN_STEPS)
    taken: dict[str, list[float]] = defaultdict(list)
    for event in timeline.rows:
        if event.stage > 0 and event.kind != "U":
            taken[event.kind].append(event.end - event.start)
    return taken


class Trainers:
    """The configurations that live in this rank's process."""

    def __init__(self, setting: Setting, rank: int, seconds: float) -> None:
        self.setting, self.rank, self.seconds = setting, rank, seconds
        self.trainers: dict[str, Trainer] = {}
        self.steps: dict[str, int] = {}
        self.first_loss: dict[str, float] = {}
        self.expected: dict[int, list[float]] = {}  # first losses by stages per rank
        self.kinds: dict[str, dict[str, list[float]]] = {}
        self.orders: dict[str, str] = {}

    def add_torch(self, pair: Pair) -> None:
        setting, v = self.setting, pair.stages_per_rank
        trainer = TorchPipeline(
            setting.workload.chunk(v),
            self.rank,
            setting.num_ranks * v,
            setting.num_microbatches,
            pair.torch_name,
            v,
        )
        if pair.name is None:
            self.orders[pair.label] = csv_of(trainer)
        label = f"torch {pair.torch_name}"
        self._add(label, pair.torch_name, trainer, v)
        if setting.workload.kind == "sleep":
            self._add_kinds(label, kinds_of_torch(trainer), v)

    def add_ours(self, name: str | None, label: str, stages_per_rank: int = 1) -> None:
        setting, v = self.setting, stages_per_rank
        trainer = Pipeline(
            setting.workload.chunk(v),
            setting.num_ranks * v,
            setting.num_microbatches,
            pd2.load_schedule(self.orders[label]) if name is None else name,
            v if name is not None else 1,
        )
        self._add(f"ours {label}", name or label, trainer, v)
        if setting.workload.kind == "sleep":
            self._add_kinds(f"ours {label}", kinds_of_ours(trainer), v)

    def forget(self, label: str) -> None:
        for of_label in (self.trainers, self.steps, self.kinds):
            of_label.pop(label, None)

    def _add(self, label: str, schedule: str, trainer: Trainer, stages_per_rank: int) -> None:
        losses = known_to_all(trainer.train(3).losses)
        # torch's first schedule of these stages tells what all others have to.
        expected = self.expected.setdefault(stages_per_rank, losses)
        check_losses(f"{self.setting.name}, {label}", schedule, losses, expected)
        warm = trainer.train(MIN_STEPS)
        steps = [float(steps_lasting(self.seconds, warm))] if warm.losses else []
        self.steps[label] = int(known_to_all(steps)[0])
        self.first_loss[label] = expected[0]
        self.trainers[label] = trainer

    def _add_kinds(self, label: str, taken: dict[str, list[float]], stages_per_rank: int) -> None:
        asked = seconds_of(self.setting.workload.chunk(stages_per_rank))
        self.kinds[label] = {
            kind: [value / asked[kind] for value in values] for kind, values in taken.items()
        }

    def measure(self, rounds: int) -> Measured:
        blocks = alternate_on_ranks(self.trainers, self.steps, rounds)
        for label, measured in blocks.items():
            if measured[-1].losses:
                check_training(label, self.first_loss[label], measured[-1].losses[-1])
        return Measured(steady_times(blocks), self.steps, self.kinds, self.orders)


def measure_pairs(
    rank: int, world_size: int, setting: Setting, rounds: int, seconds: float
) -> Measured:
    """Runs on every rank."""
    trainers = Trainers(setting, rank, seconds)
    for pair in PAIRS:
        trainers.add_torch(pair)
        trainers.add_ours(pair.name, pair.label, pair.stages_per_rank)
    for name, stages_per_rank in ASYNCHRONOUS.items():
        trainers.add_ours(name, name, stages_per_rank)
    return trainers.measure(rounds)


def measure_latency(
    rank: int, world_size: int, setting: Setting, rounds: int, seconds: float
) -> Measured:
    """Runs on every rank."""
    trainers = Trainers(setting, rank, seconds)
    trainers.add_torch(PAIRS[0])  # for its losses
    trainers.forget(f"torch {PAIRS[0].torch_name}")
    work = setting.workload.forward_seconds + setting.workload.backward_seconds
    steady: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in WITH_LATENCY:
            for label, seconds_late in ((name, 0.0), (f"{name} delayed", setting.latency * work)):
                # One at a time: a pipeline that does nothing still has threads of gloo, each of
                # which looks around a hundred times a second.
                trainers.trainers.clear()
                with delayed_messages(seconds_late) if seconds_late else contextlib.nullcontext():
                    trainers.add_ours(name, label)
                measured = trainers.measure(1)
                for of_label, seconds_per_step in measured.steady.items():
                    steady.setdefault(of_label, []).extend(seconds_per_step)
    return dataclasses.replace(measured, steady=steady)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    add_only(parser, list(SETTINGS))
    options = parser.parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    where = machine()
    print(describe(where), flush=True)
    figures: list[Figure] = []
    notes = {}
    for name in options.only:
        setting = (SMOKE_SETTINGS if options.smoke else SETTINGS)[name]
        has_latency = setting.latency > 0
        measure = measure_latency if has_latency else measure_pairs
        wakes = setting.workload.kind == "sleep" and not options.smoke
        with kept_awake() if wakes else contextlib.nullcontext():
            by_rank: list[Measured] = run_on_ranks(
                setting.num_ranks, measure, setting, rounds, seconds
            )
        # A schedule's losses are on the rank of its last stage.
        steady = {label: times for each in by_rank for label, times in each.steady.items()}
        measured = dataclasses.replace(
            by_rank[-1],
            steady={label: steady[label] for label in by_rank[-1].steps},
        )
        found = (figures_of_latency if has_latency else figures_of_pairs)(setting, measured)
        checked = figures_of_kinds(setting, by_rank)
        times = [
            Figure(setting.name, f"{label}: ms a step", [1e3 * value for value in values])
            for label, values in measured.steady.items()
        ]
        notes[name] = {
            "num_ranks": setting.num_ranks,
            "num_microbatches": setting.num_microbatches,
            "steps": measured.steps,
        }
        print(
            f"\n{name}: {setting.num_ranks} processes, m = {setting.num_microbatches}, {CHUNKS} "
            f"stages a rank where there are several; losses equal; {rounds} rounds"
        )
        print_table(times, judged=False)
        if checked:
            print_table(checked, judged=not options.smoke)
        print_table(found, judged=not options.smoke)
        figures += [*checked, *found, *times]
    write_json(options.json, where, figures, rounds=rounds, smoke=options.smoke, settings=notes)


if __name__ == "__main__":
    main()
