"""A plan's predictions against what a run takes: seconds per step, bytes per stage, the split.

Two stages on two cores, as threads and as processes, 2bw with m = 4 and AdamW; four models (GPT,
MLP, residual convolutions, long skip connections), each profiled, planned and trained in every
round. The machine's speed drifts by more than what is to be measured, so a run is compared with the
mean of the predictions from the profiles just before and just after it; a model's error is
|predicted / measured - 1|, by the median over the rounds.

Then a model whose parameters are where its work is not, split by the planner, into equal parts of
its parameters, and by hand; blocks of steps alternate.

Then how long it takes to profile a GPT of 48 blocks with 1, 2 and 4 rows, in two threads at once,
and to plan it for 1,024 devices in servers of 8, reasons included: its profile, as a V100's, has
more than 1,000 layers. Memory is ample, and near the least with which there is a plan.

    python benchmarks/planner.py [--only accuracy,split,profiler,search] [--rounds 5] [--smoke]
        [--json PATH]
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from measuring.models import (
    DEEP,
    MODELS,
    SMOKE_DEEP,
    SMOKE_MODELS,
    SMOKE_UNEVEN,
    UNEVEN,
    Model,
)
from measuring.ranks import run_on_ranks
from measuring.report import Figure, add_only, arguments, describe, machine, print_table, write_json
from measuring.stages import mse_loss
from measuring.trainers import MIN_STEPS, Block, Pipeline, Trainer, adamw, alternate
from torch import nn

import pipedream2bw as pd2

NUM_STAGES = 2
NUM_MICROBATCHES = 4
MOST_TIME_ERROR, MOST_MEMORY_ERROR = 8.0, 3.0  # percent
TIME_ERROR, MEMORY_ERROR = "error of the step's time, %", "error of a stage's bytes, %"
LEAST_GAIN = 1.3
MOST_SECONDS_TO_PROFILE = 60.0
MOST_SECONDS_TO_PLAN = 1.0
ROWS = (1, 2, 4)  # of the microbatches that are profiled
SEARCHED_MEMORY = ("1GB", "100MB", "24MB")
MOST_ABOVE_BY_HAND = 1.03  # of which the machine's noise is more than half
BY_HAND = {
    "half of the layers": "convolutions.6",
    "after the convolutions": "linears.0",
    "half of the convolutions": "convolutions.4",
    "a third of the convolutions": "convolutions.3",
}
SMOKE_BY_HAND = {"after the convolutions": "linears.0"}


class Planned(Pipeline):
    """Trains a whole model, cut as a plan says, or at a name; else as :class:`Pipeline`."""

    def __init__(self, model: Model, plan: pd2.Plan | None = None, split: str = "") -> None:
        self.batches_late = 1
        x, target = model.batch(NUM_MICROBATCHES)
        by_hand = {
            "num_stages": NUM_STAGES,
            "num_microbatches": NUM_MICROBATCHES,
            "split": [split],
        }
        self.pipe = pd2.PipelineModule(
            model.make(),
            mse_loss,
            example_args=(x[: model.rows],),
            **({"plan": plan} if plan is not None else by_hand),  # type: ignore[arg-type]
        )
        self.optimizer = pd2.PipelineOptimizer(adamw(self.pipe.parameters()))
        self.args = (x,) if self.pipe.is_first_stage else ()
        self.target = target if self.pipe.is_last_stage else None


def profile_of(model: Model, made: nn.Module, **options: Any) -> pd2.Profile:
    x, target = model.batch(1)
    return pd2.profile(made, mse_loss, example_args=(x,), target=target, **options)


def make_plan(model: Model, world_size: int, seconds: float) -> pd2.Plan:
    """Profiles and plans, on every rank."""
    profile = profile_of(
        model,
        model.make(),
        microbatch_rows=(model.rows,),
        parallel=NUM_STAGES if world_size == 1 else 1,
        seconds=seconds,
    )
    return pd2.plan(
        profile,
        devices=NUM_STAGES,
        memory="64GiB",
        batch=model.rows * NUM_MICROBATCHES,
        schedules=("2bw",),
        optimizer="adamw",
        recompute=("none",),
        width=1,
        num_stages=NUM_STAGES,
    )


@dataclasses.dataclass
class Round:
    """Seconds per step (measured on the last stage's rank, 0 elsewhere), and bytes by stage."""

    before: float  # predicted
    measured: float
    bytes: dict[int, tuple[float, float]]  # predicted, measured
    after: float = 0.0  # predicted

    @property
    def predicted(self) -> float:
        return (self.before + self.after) / 2


def accuracy(
    rank: int, world_size: int, model: Model, rounds: int, seconds: float, steps: int
) -> list[Round]:
    """Runs on every rank."""
    found: list[Round] = []
    plan = make_plan(model, world_size, seconds)
    for _ in range(rounds):
        pipeline = Planned(model, plan)
        pipeline.train(MIN_STEPS)
        block = pipeline.train(steps)
        measured = block.steady_seconds_per_step if block.losses else 0.0
        sizes = {
            stage: (plan.stages[stage].peak_bytes, float(report.total))
            for stage, report in pipeline.pipe.memory_report().items()
        }
        pipeline.close()
        found.append(Round(plan.seconds_per_batch, measured, sizes))
        plan = make_plan(model, world_size, seconds)
        found[-1].after = plan.seconds_per_batch
    return found


def equal_parameters(model: Model) -> str:
    """The name of the layer whose stage begins where the parameters are halved best."""
    x, target = model.batch(1)
    # Of the layers only names and sizes are read: no need to measure.
    profile = pd2.profile(
        model.make(),
        mse_loss,
        example_args=(x,),
        target=target,
        microbatch_rows=(model.rows,),
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    sizes = [layer.trained_bytes for layer in profile.layers]
    cuts = [i + 1 for i, layer in enumerate(profile.layers) if layer.can_cut_after]
    best = min(cuts, key=lambda cut: max(sum(sizes[:cut]), sum(sizes[cut:])))
    return profile.layers[best].name


def splits(
    rank: int,
    world_size: int,
    model: Model,
    by_hand: dict[str, str],
    rounds: int,
    seconds: float,
    steps: int,
) -> dict[str, list[Block]]:
    """Runs on every rank."""
    trainers: dict[str, Trainer] = {
        "planned": Planned(model, make_plan(model, world_size, seconds))
    }
    trainers["equal parameters"] = Planned(model, split=equal_parameters(model))
    trainers |= {name: Planned(model, split=split) for name, split in by_hand.items()}
    alternate(trainers, dict.fromkeys(trainers, MIN_STEPS), 1)
    blocks = alternate(trainers, dict.fromkeys(trainers, steps), rounds)
    for trainer in trainers.values():
        assert isinstance(trainer, Planned)
        trainer.close()
    return blocks


def profiler(rank: int, world_size: int, model: Model, rounds: int, seconds: float) -> list[float]:
    """Seconds to profile the model, of each round."""
    taken = []
    for _ in range(rounds):
        made = model.make()
        begin = time.perf_counter()
        profile_of(model, made, microbatch_rows=ROWS, parallel=NUM_STAGES, seconds=seconds)
        taken.append(time.perf_counter() - begin)
    return taken


Searches = tuple[int, dict[str, list[float]]]
"""The number of layers, and seconds of every round by the devices' memory."""


def search(rank: int, world_size: int, model: Model, devices: int, rounds: int) -> Searches:
    """Seconds to plan for so many devices, by their memory, in every round."""
    profile = profile_of(model, model.make(), microbatch_rows=ROWS, dry=pd2.KNOWN_DEVICES["v100"])
    cluster = pd2.Cluster.servers(devices, devices_per_server=8, inside="300GB/s", outside="25GB/s")
    taken: dict[str, list[float]] = {}
    for memory in SEARCHED_MEMORY:
        for _ in range(rounds):
            begin = time.perf_counter()
            pd2.plan(profile, devices=cluster, memory=memory, batch=4 * devices)
            taken.setdefault(memory, []).append(time.perf_counter() - begin)
    return len(profile.layers), taken


def accuracy_figures(name: str, results: list[list[Round]]) -> tuple[list[Figure], list[Figure]]:
    """Of one model: times, and errors in percent."""
    rounds = next(of_rank for of_rank in results if of_rank[0].measured > 0)
    of_time = [100 * (each.predicted / each.measured - 1) for each in rounds]
    of_bytes = [
        abs(100 * (predicted / measured - 1))
        for of_rank in results
        for each in of_rank
        for predicted, measured in each.bytes.values()
    ]
    times = [
        Figure(name, "predicted ms a step", [1e3 * each.predicted for each in rounds]),
        Figure(name, "measured ms a step", [1e3 * each.measured for each in rounds]),
    ]
    errors = [
        Figure(name, TIME_ERROR, of_time),
        Figure(name, MEMORY_ERROR, of_bytes),
    ]
    return times, errors


def split_figures(name: str, blocks: dict[str, list[Block]]) -> tuple[list[Figure], list[Figure]]:
    times = {
        split: [block.steady_seconds_per_step for block in of_split]
        for split, of_split in blocks.items()
    }
    shown = [
        Figure(name, f"{split}: ms a step", [1e3 * value for value in taken])
        for split, taken in times.items()
    ]
    planned = times.pop("planned")
    equal = times.pop("equal parameters")
    fastest = min(times.values(), key=statistics.median)
    judged = [
        Figure(
            name,
            "equal parameters over planned",
            [other / own for other, own in zip(equal, planned, strict=True)],
            at_least=LEAST_GAIN,
        ),
        Figure(
            name,
            "planned over the fastest by hand",
            [own / other for other, own in zip(fastest, planned, strict=True)],
            at_most=MOST_ABOVE_BY_HAND,
        ),
    ]
    return shown, judged


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    add_only(parser, ["accuracy", "split", "profiler", "search"])
    options = parser.parse_args()
    rounds, seconds, steps = (1, 0.05, MIN_STEPS) if options.smoke else (options.rounds, 1.0, 14)
    where = machine()
    print(describe(where), flush=True)
    times: list[Figure] = []
    judged: list[Figure] = []
    errors: list[Figure] = []
    for world_size, kind in ((1, "threads"), (NUM_STAGES, "processes")):
        models = SMOKE_MODELS[kind] if options.smoke else MODELS
        for name, model in models.items() if "accuracy" in options.only else ():
            results = run_on_ranks(world_size, accuracy, model, rounds, seconds, steps)
            shown, found = accuracy_figures(f"{name}, {kind}", results)
            times += shown
            errors += found
        if "split" in options.only:
            model, by_hand = (SMOKE_UNEVEN, SMOKE_BY_HAND) if options.smoke else (UNEVEN, BY_HAND)
            blocks = run_on_ranks(world_size, splits, model, by_hand, rounds, seconds, steps)[-1]
            shown, found = split_figures(f"uneven, {kind}", blocks)
            times += shown
            judged += found
    if "profiler" in options.only:
        # The time that profile() measures by default is part of what it takes.
        model, measured = (SMOKE_DEEP, seconds) if options.smoke else (DEEP, 2.0)
        (taken,) = run_on_ranks(1, profiler, model, rounds, measured)
        judged.append(
            Figure(
                f"GPT of {4 if options.smoke else 48} blocks, threads",
                "s to profile",
                taken,
                at_most=MOST_SECONDS_TO_PROFILE,
            )
        )
    if "search" in options.only:
        model, devices = (SMOKE_DEEP, 64) if options.smoke else (DEEP, 1024)
        ((num_layers, by_memory),) = run_on_ranks(1, search, model, devices, rounds)
        for memory, taken in by_memory.items():
            setting = f"{num_layers} layers, {devices} devices of {memory}"
            judged.append(Figure(setting, "s to plan", taken, at_most=MOST_SECONDS_TO_PLAN))
    for measure, most in (
        (TIME_ERROR, MOST_TIME_ERROR),
        (MEMORY_ERROR, MOST_MEMORY_ERROR),
    ):
        medians = [abs(figure.median) for figure in errors if figure.measure == measure]
        if medians:
            judged.append(Figure("all models", f"{measure}: |medians|", medians, at_most=most))
    if times:
        print_table(times + errors, judged=False)
        print()
    print_table(judged, judged=not options.smoke)
    write_json(options.json, where, judged + errors + times, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
