"""Trainings by Trainers of transformers, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from pipedream2bw.integrations.transformers import PipelineTrainer
from tests.samples.trainer_tasks import TrainerTask

Log = list[dict[str, Any]]
_TIMES = ("runtime", "per_second", "total_flos")


def log_of(trainer: Trainer) -> Log:
    """The log history without times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in trainer.state.log_history
    ]


def stock(task: TrainerTask, folder: Any, *, options: Any = None, **arguments: Any) -> Trainer:
    """A Trainer, not yet run."""
    given = {**task.arguments(folder, **arguments), **(options or {})}
    return Trainer(task.model(), **given)


def piped(
    task: TrainerTask,
    folder: Any,
    pipeline: Mapping[str, Any],
    *,
    options: Any = None,
    **arguments: Any,
) -> PipelineTrainer:
    """The same with a pipeline."""
    given = {**task.arguments(folder, **arguments), **(options or {})}
    return PipelineTrainer(task.model(), pipeline=pipeline, **given)


def assert_same_log(got: Log, want: Log, *, within: float = 1e-6, missing: str = "") -> None:
    """Compares numbers relative to themselves.

    Args:
        missing: a name that ``got`` may lack.
    """
    assert len(got) == len(want), (got, want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() - {missing} == theirs.keys() - {missing}
        for name in ours:
            assert math.isclose(ours[name], theirs[name], rel_tol=within), (name, ours, theirs)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights; of a pipeline on rank 0."""
    pipe = getattr(trainer, "pipe", None)
    state = trainer.model.state_dict() if pipe is None else pipe.full_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same_state(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], *, within: float = 1e-6
) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        distance = (got[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert distance <= within, (name, float(distance))
