"""Replicas that take different numbers of a batch's microbatches train what one model would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.references.oracle import Batch, Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import (
    MakeOptimizer,
    Trajectory,
    assert_same,
    copy_of,
    drawing,
    make_pipeline,
    sgd,
)
from tests.samples.models import TASKS, Task, whole

SCHEDULES = {"2bw": 1, "2bw_split": 1, "1f1b": 1, "2bw_v": 2}
"""Stages of a rank."""


def batches_of(task: Task, numbers: Sequence[int], count: int, **rows: int) -> list[list[Batch]]:
    """Of each replica, in which a microbatch has two rows."""
    extra = rows.get("extra", 0)
    return [
        task.batches([2 * m + extra * ((replica + t) % 2) for t in range(count)], seed=10 + replica)
        for replica, m in enumerate(numbers)
    ]


def by_definition(
    task: Task,
    by_replica: Sequence[Sequence[Batch]],
    numbers: Sequence[int],
    schedule: str,
    make: MakeOptimizer = sgd,
    **options: Any,
) -> Trajectory:
    model = whole(task.model())
    oracle = Oracle(
        model,
        make(model.parameters()),
        numbers,
        task.loss_fn,
        delay=int("2bw" in schedule),
        num_pipelines=1 + int(schedule == "chimera"),
        drawing=drawing,
        **options,
    )
    losses = [oracle.train_replicas(batches)[0] for batches in zip(*by_replica, strict=True)]
    return Trajectory(losses, copy_of(model.state_dict()))


def follows(
    task: Task,
    d: int,
    by_replica: Sequence[Sequence[Batch]],
    numbers: Sequence[int],
    schedule: str = "2bw",
    make: MakeOptimizer = sgd,
    *,
    exact: bool = True,
    optimizer: Any = None,
    **options: Any,
) -> None:
    """On every rank: compares losses, and the parameters that it holds, with the definition."""
    shared = {key: options[key] for key in ("loss_reduction",) if key in options}
    want = by_definition(task, by_replica, numbers, schedule, make, **shared)
    options |= {"width": len(numbers), "schedule": schedule}
    with make_pipeline(task, d, list(numbers), by_replica[0][0], **options) as pipe:  # type: ignore[arg-type]
        assert pipe.num_microbatches == numbers[pipe.replica]
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **optimizer or {})
        losses = []
        for batch in by_replica[pipe.replica]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    held = {name: want.state[name] for name in got.state}
    assert_same(got, Trajectory(want.losses, held), exact=exact)


def least(schedule: str, d: int) -> int:
    for m in range(1, 4 * d + 1):
        try:
            pd2.make_schedule(schedule, d, m, SCHEDULES[schedule])
        except ValueError:
            continue
        return m
    raise LookupError(f"{schedule}, {d} stages")


def every_schedule(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    task, ranks = TASKS["drawing"], world // width
    for schedule, v in SCHEDULES.items():
        d = ranks * v
        numbers = random.Random(repr((schedule, world, width))).choices(range(5), k=width)
        numbers = [least(schedule, d) + number for number in numbers]
        for extra in (0, 1):  # also microbatches of different rows
            by_replica = batches_of(task, numbers, 4, extra=extra)
            follows(task, d, by_replica, numbers, schedule, stages_per_rank=v)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "width"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_unequal_replicas_train_what_one_model_with_all_microbatches_does(
    world: int, width: int
) -> None:
    run_ranks(every_schedule, world, args=(width,), timeout=170)
