"""Trainings by Trainers of transformers, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer

from pipedream2bw.extras.transformers import PipelineTrainer
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


def assert_same_log(got: Log, want: Log, *, within: float = 1e-6) -> None:
    """Compares numbers relative to themselves."""
    assert len(got) == len(want), (got, want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
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


class DelayedByOne(transformers.TrainerCallback):
    """Makes a stock Trainer compute batch t at W(max(t-1, 0)): the definition of ``"2bw"``."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._older = _weights(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._newest = _weights(kwargs["model"])
        _show(kwargs["model"], self._older)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _show(kwargs["model"], self._newest)
        self._older = self._newest


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _show(model: nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def delayed(task: TrainerTask, folder: Any, **arguments: Any) -> Trainer:
    """The oracle of :func:`piped` under ``"2bw"``, not yet run."""
    return stock(task, folder, options={"callbacks": [DelayedByOne()]}, **arguments)


def assert_same_delayed_log(got: Log, want: Log) -> None:
    """Compares logs under a delay, where a step's entry has the norm of the step before."""
    norms = [[entry.get("grad_norm") for entry in log if "loss" in entry] for log in (got, want)]
    assert norms[0][0] is None
    assert norms[0][1:] == pytest.approx(norms[1][:-1], rel=1e-5)
    without = [[{**entry, "grad_norm": 0.0} for entry in log] for log in (got, want)]
    assert_same_log(*without)
