"""PipelineTrainer in one process, against the stock Trainer."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")

import transformers
from transformers import Trainer

from pipedream2bw.extras.transformers import PipelineTrainer
from tests.exhaustive import exhaustive
from tests.runs.trainers import (
    assert_same_log,
    assert_same_state,
    log_of,
    piped,
    state_of,
    stock,
)
from tests.samples.trainer_tasks import TASKS

TWO = {"num_stages": 2, "schedule": "1f1b"}
ALWAYS = ("mixtral", "lora")  # Llama, GPT-2 and ViT are trained in other tests
LLAMA, VIT, BERT = TASKS["llama"], TASKS["vit"], TASKS["bert"]


def train_both(
    name: str, folder: Path, *, options: Any = None, **arguments: Any
) -> tuple[PipelineTrainer, Trainer]:
    trainers = (
        piped(TASKS[name], folder / "piped", TWO, options=options, **arguments),
        stock(TASKS[name], folder / "stock", options=options, **arguments),
    )
    for trainer in trainers:
        trainer.train()
    return trainers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*ALWAYS, *exhaustive(*(name for name in TASKS if name not in ALWAYS))]
)
def test_logs_and_weights_are_those_of_the_stock_trainer(name: str, tmp_path: Path) -> None:
    ours, theirs = train_both(
        name, tmp_path, eval_strategy="epoch", optim="sgd", learning_rate=0.1, weight_decay=0.01
    )
    assert_same_log(log_of(ours), log_of(theirs))
    assert len(log_of(ours)) == 9
    assert_same_state(state_of(ours), state_of(theirs))
    # The model shows the trained weights.
    assert_same_state(ours.model.state_dict(), state_of(theirs))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def best_class(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def test_metrics_and_predictions_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    options = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best_class}
    ours, theirs = train_both("vit", tmp_path, options=options, max_steps=2, eval_strategy="steps")
    assert_same_log(log_of(ours), log_of(theirs))
    assert "eval_accuracy" in log_of(ours)[-2]
    data = VIT.data(7, seed=3)
    predicted = [trainer.predict(data) for trainer in (ours, theirs)]
    np.testing.assert_array_equal(predicted[0].predictions, predicted[1].predictions)
    np.testing.assert_array_equal(predicted[0].label_ids, predicted[1].label_ids)
    # Without labels, which the pipeline's calls have had so far.
    images = [{"pixel_values": row["pixel_values"]} for row in data]
    for trainer in (ours, theirs):
        trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
    predicted = [trainer.predict(images) for trainer in (ours, theirs)]
    np.testing.assert_allclose(predicted[0].predictions, predicted[1].predictions, rtol=1e-5)
    assert predicted[0].label_ids is None
    assert predicted[0].metrics.keys() == predicted[1].metrics.keys()


def test_a_model_is_evaluated_before_it_is_trained(tmp_path: Path) -> None:
    ours, theirs = piped(VIT, tmp_path, TWO), stock(VIT, tmp_path)
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
    return (losses * (1 + labels)).sum() / num_items_in_batch


class Weighted:
    """A user's compute_loss, for both kinds of trainers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = own_loss(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class WeightedTrainer(Weighted, Trainer):
    pass


class WeightedPipelineTrainer(Weighted, PipelineTrainer):
    pass


@pytest.mark.parametrize("kind", ["compute_loss_func", "compute_loss", "label smoothing"])
def test_losses_of_ones_own_are_obeyed(kind: str, tmp_path: Path) -> None:
    given = VIT.arguments(
        tmp_path,
        max_steps=3,
        eval_strategy="steps",
        label_smoothing_factor=0.1 if kind == "label smoothing" else 0.0,
    )
    if kind == "compute_loss_func":
        given["compute_loss_func"] = own_loss
    own = kind == "compute_loss"
    ours = (WeightedPipelineTrainer if own else PipelineTrainer)(VIT.model(), pipeline=TWO, **given)
    theirs = (WeightedTrainer if own else Trainer)(VIT.model(), **given)
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_log(log_of(ours), log_of(theirs))
    plain = piped(VIT, tmp_path, TWO, max_steps=1)
    plain.train()
    assert log_of(plain)[0]["loss"] != log_of(ours)[0]["loss"]


def test_labels_are_shifted_where_they_are_smoothed(tmp_path: Path) -> None:
    ours, theirs = train_both("lora", tmp_path, max_steps=1, label_smoothing_factor=0.2)
    assert_same_log(log_of(ours), log_of(theirs))


class Plain(torch.nn.Module):
    """No model of transformers: its loss is a mean over the microbatch, whatever the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.first, self.second = torch.nn.Linear(768, 16), torch.nn.Linear(16, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(pixel_values.flatten(1)).tanh() * self.scale)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_plain_module_is_trained_on_means_of_microbatches(tmp_path: Path) -> None:
    task = dataclasses.replace(VIT, build=Plain)
    given: dict[str, Any] = {
        "eval_strategy": "epoch",
        "weight_decay": 0.1,
        "save_strategy": "epoch",
    }
    ours, theirs = piped(task, tmp_path / "a", TWO, **given), stock(task, tmp_path / "b", **given)
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_log(log_of(ours), log_of(theirs))
    assert_same_state(state_of(ours), state_of(theirs), within=1e-5)


class Recorder(transformers.TrainerCallback):
    """Which events there were, and at which steps; stops at the fifth."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_event(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def recorded(name: str) -> Any:
    def on_event(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.events.append((name, state.global_step))
        if name == "on_step_end" and state.global_step == 5:
            control.should_training_stop = True
        return control

    return on_event


for _event in ("train_begin", "epoch_begin", "step_begin", "substep_end", "step_end", "log"):
    setattr(Recorder, f"on_{_event}", recorded(f"on_{_event}"))


def test_callbacks_are_called_as_by_the_stock_trainer(tmp_path: Path) -> None:
    recorders = Recorder(), Recorder()
    ours = piped(VIT, tmp_path, TWO, options={"callbacks": [recorders[0]]})
    theirs = stock(VIT, tmp_path, options={"callbacks": [recorders[1]]})
    for trainer in (ours, theirs):
        trainer.train()
    assert recorders[0].events == recorders[1].events
    assert ours.state.global_step == 5
    assert_same_log(log_of(ours), log_of(theirs))


@pytest.mark.parametrize("seldom", [4, *exhaustive(1)])
def test_losses_are_logged_whenever(seldom: int, tmp_path: Path) -> None:
    ours, theirs = train_both("vit", tmp_path, logging_steps=seldom, logging_first_step=True)
    assert_same_log(log_of(ours), log_of(theirs))


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5},
        {"optim": "adafactor", "max_grad_norm": 0.0},
        {"optim": "rmsprop", "lr_scheduler_type": "constant"},
        {"seed": 7, "data_seed": 8, "train_sampling_strategy": "sequential"},
        {"dataloader_num_workers": 1, "dataloader_drop_last": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_training_arguments_are_obeyed(arguments: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = train_both("vit", tmp_path, **arguments)
    assert_same_log(log_of(ours), log_of(theirs), within=2e-5 if "optim" in arguments else 1e-6)
    assert_same_state(state_of(ours), state_of(theirs), within=1e-4)


def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    logs = []
    for kind in (piped, stock):
        extra = (TWO,) if kind is piped else ()
        trainer = kind(VIT, tmp_path, *extra)  # type: ignore[operator]
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
        trainer.optimizer = optimizer
        trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        trainer.train()
        logs.append(log_of(trainer))
    assert_same_log(*logs)
    assert logs[0][0]["learning_rate"] == 0.1
    assert logs[0][-2]["learning_rate"] < 0.1


def test_half_precision_has_float32_masters(tmp_path: Path) -> None:
    trainer = piped(VIT, tmp_path, TWO, bf16=True)
    trainer.train()
    assert all(value.dtype == torch.float32 for value in state_of(trainer).values())
    exact = piped(VIT, tmp_path, TWO)
    exact.train()
    losses = [[entry.get("loss") for entry in log_of(t)][:-1] for t in (trainer, exact)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
