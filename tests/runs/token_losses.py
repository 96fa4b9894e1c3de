"""Trainings on padded text, whose losses are divided by the number of tokens that count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2
from tests.references.oracle import Batch, Oracle
from tests.runs.trajectory import Trajectory, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS, Task, whole

PADDING = -100


def sum_of_token_losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), ignore_index=PADDING, reduction="sum"
    )


def count(target: torch.Tensor) -> int:
    return int((target != PADDING).sum())


TASK = dataclasses.replace(TASKS["gpt"], loss_fn=sum_of_token_losses)


def padded(rows: Sequence[int], seed: int = 2, task: Task = TASK) -> list[Batch]:
    """Batches in which rows end at random; the second one has no token that counts."""
    batches = task.batches(rows, seed)
    draw = torch.Generator().manual_seed(seed)
    for number, batch in enumerate(batches):
        length = batch.target.shape[1]
        for row in batch.target:
            row[int(torch.randint(length + 1, (), generator=draw)) if number != 1 else 0 :] = (
                PADDING
            )
    return batches


def by_definition(
    by_replica: Sequence[Sequence[Batch]],
    numbers: int | Sequence[int],
    accumulate: int = 1,
    task: Task = TASK,
    **options: Any,
) -> Trajectory:
    """What one model with all microbatches of all replicas and train_steps trains."""
    model = whole(task.model())
    oracle = Oracle(
        model, sgd(model.parameters()), numbers, task.loss_fn, loss_reduction="sum", **options
    )
    steps = list(zip(*by_replica, strict=True))
    losses: list[float] = []
    for first in range(0, len(steps), accumulate):
        of_batch = steps[first : first + accumulate]
        total = sum(count(batch.target) for step in of_batch for batch in step)
        found = oracle.train_together(of_batch, normalizer=total)
        losses += [replicas[0] for replicas in found]
    return Trajectory(losses, copy_of(model.state_dict()))


def by_pipeline(
    batches: Sequence[Batch],
    num_stages: int,
    m: int | Sequence[int],
    accumulate: int = 1,
    task: Task = TASK,
    **options: Any,
) -> Trajectory:
    """The same by a pipeline, in this process's part."""
    options = {"normalizer": True, "loss_reduction": "sum", "accumulate": accumulate, **options}
    is_given = options["normalizer"] is True
    with make_pipeline(task, num_stages, m, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for first in range(0, len(batches), accumulate):
            of_batch = batches[first : first + accumulate]
            total = sum(count(batch.target) for batch in of_batch)
            for batch in of_batch:
                given = {"normalizer": total} if is_given else {}
                losses.append(pipe.train_step(*batch.args, target=batch.target, **given))
            opt.step()
        return Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
