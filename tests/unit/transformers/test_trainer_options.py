"""TrainingArguments that change how a step is computed, and data that comes as a stream."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")

from transformers import Trainer

import pipedream2bw as pd2
from pipedream2bw.extras.transformers import PipelineTrainer
from tests.runs.trainers import assert_same_log, assert_same_state, log_of, piped, state_of, stock
from tests.samples.trainer_tasks import TASKS

TWO = {"num_stages": 2, "schedule": "1f1b"}
VIT, GPT2, LLAMA = TASKS["vit"], TASKS["gpt2"], TASKS["llama"]


def options_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Filled with what the next pipeline is made with."""
    options: dict[str, Any] = {}

    def make(*args: Any, **given: Any) -> pd2.PipelineModule:
        options.update(given)
        return module(*args, **given)

    module = pd2.PipelineModule
    monkeypatch.setattr(pd2, "PipelineModule", make)
    return options


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"activation_checkpointing": True}, {"recompute": True}),
        (
            {"torch_compile": True, "torch_compile_backend": "eager"},
            {"compile": {"backend": "eager"}},
        ),
    ],
    ids=["recomputed", "compiled"],
)
def test_a_step_computed_otherwise_has_the_same_numbers(
    arguments: dict[str, Any],
    option: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options_of_the_pipeline(monkeypatch)
    ours = piped(VIT, tmp_path / "ours", TWO, max_steps=3, **arguments)
    theirs = stock(VIT, tmp_path / "theirs", max_steps=3)
    for trainer in (ours, theirs):
        trainer.train()
    assert option.items() <= options.items()
    assert_same_log(log_of(ours), log_of(theirs), within=1e-5)
    assert_same_state(state_of(ours), state_of(theirs), within=1e-5)


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Rows that have no number; counts how often it was begun."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows
        self.begun = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.begun += 1
        return iter(self.rows)


def test_a_stream_is_trained_on_as_by_the_stock_trainer(tmp_path: Path) -> None:
    streams = Stream(GPT2.data(40)), Stream(GPT2.data(40))
    given: dict[str, Any] = {"max_steps": 6, "optim": "sgd", "learning_rate": 0.1}
    ours = piped(GPT2, tmp_path / "a", TWO, options={"train_dataset": streams[0]}, **given)
    theirs = stock(GPT2, tmp_path / "b", options={"train_dataset": streams[1]}, **given)
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_log(log_of(ours), log_of(theirs))
    assert_same_state(state_of(ours), state_of(theirs))
    assert streams[0].begun == streams[1].begun + 1  # for the example


def test_half_precision_trains_masters_with_a_loss_scale(tmp_path: Path) -> None:
    scale = pd2.LossScale(2.0**10)
    ours = piped(
        VIT,
        tmp_path / "ours",
        TWO,
        options={"pipeline_optimizer": {"loss_scale": scale}},
        max_steps=6,
        fp16=True,
    )
    theirs = stock(VIT, tmp_path / "theirs", max_steps=6)
    for trainer in (ours, theirs):
        trainer.train()
    losses = [[e["loss"] for e in log_of(t) if "loss" in e] for t in (ours, theirs)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    memory = ours.pipe.memory_report()[0]
    assert memory.masters == 2 * memory.weights > 0


def test_a_step_that_overflows_is_skipped_and_counted(tmp_path: Path) -> None:
    ours = piped(VIT, tmp_path, TWO, max_steps=2, fp16=True)
    before = state_of(stock(VIT, tmp_path))
    ours.train()
    first, second = [entry for entry in log_of(ours) if "loss" in entry]
    assert math.isnan(first["grad_norm"])  # the first scale is too large for these gradients
    assert math.isfinite(second["grad_norm"])
    assert (first["learning_rate"], second["learning_rate"]) == (0.01, 0.005)
    after = state_of(ours)
    assert any((after[name] != before[name]).any() for name in after)
    assert all(torch.isfinite(value).all() for value in after.values())


def test_an_evaluation_leaves_out_batches_of_no_items_as_the_stock_trainer_does(
    tmp_path: Path,
) -> None:
    ours = piped(LLAMA, tmp_path / "ours", TWO, per_device_eval_batch_size=2)
    theirs = stock(LLAMA, tmp_path / "theirs", per_device_eval_batch_size=2)
    rows = LLAMA.data(6)
    for row in rows[:2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    found = [trainer.evaluate(rows)["eval_loss"] for trainer in (ours, theirs)]
    assert found[0] == pytest.approx(found[1], rel=1e-6, nan_ok=True)


def test_arguments_that_a_search_changes_are_obeyed(tmp_path: Path) -> None:
    """It sets them after the construction, and has the model made anew."""
    logs = []
    for make in (functools.partial(piped, pipeline=TWO), stock):
        trainer = make(VIT, tmp_path, max_steps=3, learning_rate=0.1)
        trainer.args.max_grad_norm = 1e-3
        trainer.train()
        logs.append(log_of(trainer))
    assert_same_log(*logs)


class MakesItsOptimizer:
    """A user's create_optimizer, for both kinds of trainers: over the whole model."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        return self.optimizer


class OwnTrainer(MakesItsOptimizer, Trainer):
    pass


class OwnPipelineTrainer(MakesItsOptimizer, PipelineTrainer):
    pass


def test_the_optimizer_of_a_subclass_is_taken(tmp_path: Path) -> None:
    given = VIT.arguments(tmp_path, max_steps=3)
    ours, theirs = (
        OwnPipelineTrainer(VIT.model(), pipeline=TWO, **given),
        OwnTrainer(VIT.model(), **given),
    )
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_log(log_of(ours), log_of(theirs))
    assert_same_state(state_of(ours), state_of(theirs))


def test_autocast_to_float16_has_a_loss_scale(tmp_path: Path) -> None:
    ours = piped(VIT, tmp_path, {**TWO, "autocast": torch.float16}, max_steps=1, fp16=True)
    ours.train()
    assert ours.optimizer.loss_scale is not None
