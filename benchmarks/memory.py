"""What memory_report() says, against the formulas and against the process's peak resident memory.

A model of 151 million parameters in two equal stages of 24 transformer blocks, |W| bytes of float32
weights, AdamW:

    stage i       weights   gradients   optimizer state   microbatches in flight
    2bw           2|W|/d    |W|/d       2|W|/d            min(d - i, m)
    2bw_fresh     2|W|/d    |W|/d       3|W|/d            min(d - i, m)    with error feedback
    1f1b          |W|/d     |W|/d       2|W|/d            min(d - i, m)
    gpipe         |W|/d     |W|/d       2|W|/d            m

The first three must be exact. Growth is VmHWM (the peak of resident memory) after some batches less
VmRSS before the model was built, in a fresh process that has trained a pipeline of one such layer a
stage before and given its memory back, so that libraries are loaded. It counts everything: the
whole model that every process builds before PipelineModule takes it over, temporaries of forward
and backward, messages, the allocator's waste. The user's batch exists before and is not counted.

    python benchmarks/memory.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import dataclasses

import torch
from measuring.memory import resident_bytes
from measuring.ranks import run_on_ranks
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload
from measuring.trainers import LEARNING_RATE
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.model.storages import return_freed_memory
from pipedream2bw.runtime.stage_memory import StageMemory

NUM_STAGES = 2
NUM_MICROBATCHES = 4
NUM_BATCHES = 4
MAX_GROWTH_OVER_REPORT = 1.05
WORKLOAD = Workload("transformer", rows=1, hidden=512, layers=24, sequence=64)
SMOKE_WORKLOAD = Workload("transformer", rows=1, hidden=128, layers=1, sequence=16)
CONFIGURATIONS = (
    *(("2bw", True), ("2bw_fresh", True), ("1f1b", True), ("gpipe", True)),
    ("2bw", False),
)
"""Schedule, and whether every stage is a process."""


@dataclasses.dataclass
class StageBytes:
    """A stage's kinds of memory, reported and by formula (activations: number in flight)."""

    stage: int
    reported: dict[str, int]
    formula: dict[str, int]
    activation_bytes: int


@dataclasses.dataclass
class ProcessBytes:
    stages: list[StageBytes]
    report: int
    growth: int


def train(
    workload: Workload, schedule: str, x: torch.Tensor, target: torch.Tensor
) -> dict[int, StageMemory]:
    pipe = pd2.PipelineModule(
        [workload.stage(index) for index in range(NUM_STAGES)],
        nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        example_args=(x[: workload.rows],),
    )
    optimizer = pd2.PipelineOptimizer(
        torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE),
        staleness=pd2.ErrorFeedback() if schedule == "2bw_fresh" else (),
    )
    with pipe:
        for _ in range(NUM_BATCHES):
            pipe.train_step(x, target=target)
            optimizer.step()
        pipe.flush()
        return pipe.memory_report()


def measure(rank: int, world_size: int, workload: Workload, schedule: str) -> ProcessBytes:
    """Runs on every rank."""
    # One layer of the same size, so that the libraries have loaded what they compute it with.
    small = dataclasses.replace(workload, layers=1)
    train(small, schedule, *small.batch(NUM_MICROBATCHES))
    return_freed_memory()  # or it would serve the large model, uncounted
    x, target = workload.batch(NUM_MICROBATCHES)
    with torch.device("meta"):
        weights = sum(p.nbytes for p in workload.stage(0).parameters())  # |W| / d
    before = resident_bytes("VmRSS")
    report = train(workload, schedule, x, target)
    growth = resident_bytes("VmHWM") - before
    stages = []
    for index, stage in report.items():
        in_flight = min(NUM_STAGES - index, NUM_MICROBATCHES)
        formula = {
            "weights": (2 if "2bw" in schedule else 1) * weights,
            "gradients": weights,
            "optimizer_state": (3 if schedule == "2bw_fresh" else 2) * weights,
            "most_in_flight": NUM_MICROBATCHES if schedule == "gpipe" else in_flight,
        }
        reported = {kind: getattr(stage, kind) for kind in formula}
        stages.append(StageBytes(index, reported, formula, stage.activations))
    return ProcessBytes(stages, sum(stage.total for stage in report.values()), growth)


def print_stage(stage: StageBytes) -> None:
    for kind, reported in stage.reported.items():
        formula = stage.formula[kind]
        verdict = "equal" if reported == formula else "DIFFERENT"
        print(
            f"  stage {stage.stage}  {kind:16} {reported:>13,}  formula {formula:>13,}  {verdict}"
        )
    print(f"  stage {stage.stage}  {'activations':16} {stage.activation_bytes:>13,}")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=None).parse_args()
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    configurations = CONFIGURATIONS[::4] if options.smoke else CONFIGURATIONS
    where = machine()
    print(describe(where), flush=True)
    figures: list[Figure] = []
    details = {}
    exact = True
    for schedule, in_processes in configurations:
        world_size = NUM_STAGES if in_processes else 1
        name = f"{schedule}, {'processes' if in_processes else 'threads'}"
        print(f"\n{name}, bytes:", flush=True)
        processes = run_on_ranks(world_size, measure, workload, schedule)
        for rank, process in enumerate(processes):
            for stage in process.stages:
                print_stage(stage)
                exact &= stage.reported == stage.formula
            print(f"  process {rank}: report {process.report:,}, peak growth {process.growth:,}")
        ratios = [process.growth / process.report for process in processes]
        measure_name = "worst process: peak growth over the report's total"
        figures.append(
            Figure(name, measure_name, [max(ratios)], at_most=MAX_GROWTH_OVER_REPORT, ideal=1.0)
        )
        details[name] = [dataclasses.asdict(process) for process in processes]
    print()
    print_table(figures, judged=not options.smoke)
    print(f"formulas: {'all exact' if exact else 'DIFFERENT, see above'}")
    write_json(options.json, where, figures, exact=exact, smoke=options.smoke, processes=details)


if __name__ == "__main__":
    main()
