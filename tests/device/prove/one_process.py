"""Leaves them out of trainings in one process, on two devices in turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pipedream2bw as pd2
from tests.device.on_device import batch_on, on, places
from tests.device.prove.outcomes import (
    KINDS,
    NOTHING,
    NUM_BATCHES,
    Between,
    Outcome,
    count,
    train,
    without,
)
from tests.runs.trajectory import Trajectory, assert_same, make_pipeline
from tests.samples.models import TASKS, Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, on two devices in turn.

    Attributes:
        rows: of a microbatch.
        between: what else is done.
        optimizer: options of PipelineOptimizer.
        options: of PipelineModule.
    """

    task: Task
    num_stages: int = 3
    m: int = 3
    rows: int = 1
    between: Between = NOTHING
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, device: str, judged: Callable[[], None] = lambda: None) -> Trajectory:
        """Trains there; the state is the host's. Calls ``judged`` after the first batches."""
        task = self.task if device == "cpu" else on(self.task, device)
        options = self.options
        if device != "cpu":
            options = {**options, "devices": places(self.num_stages, 2)}
        rows = [self.m * self.rows] * NUM_BATCHES
        batches = [batch_on(each, device) for each in self.task.batches(rows)]
        with make_pipeline(task, self.num_stages, self.m, batches[0], **options) as pipe:
            return train(pipe, batches, judged, self.between, **self.optimizer)


_LANGUAGE_MODEL = TIED["language model"]
_ON_HOST = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}

TRAININGS = {
    "2bw, skips, clipping": Training(SKIPS, optimizer={"max_grad_norm": 0.1}),
    "1f1b, recomputation": Training(SKIPS, options={"schedule": "1f1b", "recompute": True}),
    "halves of backwards": Training(SKIPS, options={"schedule": "zero_bubble"}),
    "chimera": Training(SKIPS, num_stages=2, m=4, options={"schedule": "chimera"}),
    "tied": Training(
        Task(_LANGUAGE_MODEL.build, _LANGUAGE_MODEL.draw, float_token_loss),
        num_stages=2,
        options={"split": ["blocks.2"]},
    ),
    "split masters, loss scale": Training(
        SKIPS,
        optimizer={"loss_scale": pd2.LossScale(2.0**10), "max_grad_norm": 0.1},
        options={"precision": "bf16", "split_master": True},
    ),
    "optimizer on the host": Training(SKIPS, options=_ON_HOST),
    "saves": Training(TASKS["batch norm"], num_stages=2, rows=2, between=Between(saves=True)),
    "evaluation": Training(SKIPS, between=Between(evaluates=True)),
    "graphs": Training(TASKS["mlp"], num_stages=2, m=6, options={"graphs": "auto"}),
}


_LEAST = 8
"""Of a kind: one of two may be needed, and a sample of three would find none now and then."""


def prove(training: Training, every: int) -> Iterator[Outcome]:
    """Gives what became of what was left out: one of ``every``, but eight of a kind at least."""
    run = functools.partial(training.run, "checked:0")
    want = training.run("cpu")
    assert_same(run(), want)  # first uses
    for kind in KINDS:
        number = count(run, want, kind)
        for n in range(1, number + 1, max(1, min(every, number // _LEAST))):
            yield kind, n, without(run, want, kind, n)
