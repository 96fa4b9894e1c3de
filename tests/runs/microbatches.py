"""Trainings on batches of few rows and on ready-made microbatches, in processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pipedream2bw as pd2
from tests.references.oracle import Batch, Oracle, ReadyMade
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    copy_of,
    drawing,
    make_pipeline,
    sgd,
    train_on,
)
from tests.samples.models import TASKS

DROPOUT = dataclasses.replace(TASKS["dropout in eval"], training=True)
M = 4
SIZES = ((2, 2, 2, 2), (3,), (1, 2, 1), 5, (4, 1), 2, (2, 2), 8)
"""Of each train_step: rows of ready-made microbatches, or of a batch."""


def batches_of(replica: int, schedule: str) -> list[Batch | ReadyMade]:
    """Each replica is given another number of rows at a time."""
    sizes = [*SIZES[replica:], *SIZES[:replica]]
    if "chimera" in schedule:  # each pipeline needs a microbatch
        sizes.remove((3,))
    return [
        DROPOUT.batches([each], seed=9 + t + replica)[0]
        if isinstance(each, int)
        else ReadyMade(DROPOUT.batches(each, seed=9 + t + replica))
        for t, each in enumerate(sizes)
    ]


def check(world: int, rank: int, schedule: str, width: int, accumulate: int = 1) -> None:
    """Trains a replica's part and compares what this rank holds with the definition."""
    d = world // width
    losses = []
    options: dict[str, Any] = {"schedule": schedule, "width": width, "accumulate": accumulate}
    with make_pipeline(DROPOUT, d, M, DROPOUT.batches([2])[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for t, batch in enumerate(batches_of(rank // d, schedule)):
            losses.append(train_on(pipe, batch))
            if (t + 1) % accumulate == 0:
                opt.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    want = _by_definition(schedule, width, accumulate, rank // d)
    assert_same(got, Trajectory(want.losses, {name: want.state[name] for name in got.state}))


def _by_definition(schedule: str, width: int, accumulate: int, replica: int) -> Trajectory:
    model = DROPOUT.model()
    oracle = Oracle(
        model,
        sgd(model.parameters()),
        M,
        DROPOUT.loss_fn,
        delay=int("2bw" in schedule),
        num_pipelines=2 if "chimera" in schedule else 1,
        drawing=drawing,
    )
    by_replica = [batches_of(replica, schedule) for replica in range(width)]
    steps = list(zip(*by_replica, strict=True))
    losses: list[float] = []
    for first in range(0, len(steps), accumulate):
        found = oracle.train_together(steps[first : first + accumulate])
        losses += [replicas[replica] for replicas in found]
    return Trajectory(losses, copy_of(model.state_dict()))
