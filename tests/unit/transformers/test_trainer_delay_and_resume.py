"""PipelineTrainer under a delay against the definition; and runs that go on from a checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")

import transformers
from peft import AutoPeftModelForCausalLM

from tests.exhaustive import exhaustive
from tests.runs.trainers import (
    assert_same_delayed_log,
    assert_same_log,
    assert_same_state,
    delayed,
    log_of,
    piped,
    state_of,
    stock,
)
from tests.samples import trainer_tasks
from tests.samples.trainer_tasks import TASKS, TrainerTask

TWO = {"num_stages": 2}
VIT = TASKS["vit"]


def dropping() -> torch.nn.Module:
    """A model whose stages draw random numbers."""
    model: Any = trainer_tasks.vit()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return model


DROPPING = dataclasses.replace(VIT, build=dropping)


@pytest.mark.parametrize("name", ["vit", *exhaustive("lora")])
def test_2bw_trains_as_its_definition_says(name: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eval_strategy": "epoch", "max_grad_norm": 0.3}
    ours = piped(TASKS[name], tmp_path / "ours", TWO, **arguments)
    theirs = delayed(TASKS[name], tmp_path / "theirs", **arguments)
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_delayed_log(log_of(ours), log_of(theirs))
    assert_same_state(state_of(ours), state_of(theirs), within=1e-5)
    synchronous = stock(TASKS[name], tmp_path / "stock", **arguments)
    synchronous.train()
    assert log_of(synchronous)[2]["loss"] != pytest.approx(log_of(ours)[2]["loss"], rel=1e-5)


@pytest.mark.parametrize("schedule", ["2bw", *exhaustive("1f1b")])
@pytest.mark.parametrize("step", [2, *exhaustive(3)])  # in the middle of an epoch, and at its end
def test_a_run_goes_on_with_the_same_bits(schedule: str, step: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
    }
    pipeline = {**TWO, "schedule": schedule}
    whole = piped(DROPPING, tmp_path / "run", pipeline, **arguments)
    whole.train()
    other = dataclasses.replace(DROPPING, build=lambda: torch.manual_seed(5) and dropping())
    resumed = piped(other, tmp_path / "resumed", pipeline, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    want, got = log_of(whole), log_of(resumed)
    # The norm of the step before is not known after a start.
    first = {**want[step], "grad_norm": got[step].get("grad_norm")}
    assert got[:step] == want[:step]
    assert {**got[step], "grad_norm": first["grad_norm"]} == first
    assert got[step + 1 : -1] == want[step + 1 : -1]
    for name, value in state_of(whole).items():
        assert torch.equal(value, state_of(resumed)[name]), name


def test_a_run_goes_on_from_the_newest_whole_checkpoint_on_more_stages(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    whole = piped(DROPPING, tmp_path, TWO, **arguments)
    whole.train()
    want, state = log_of(whole), state_of(whole)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    shutil.rmtree(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6").mkdir()  # a process that was killed while it saved
    resumed = piped(DROPPING, tmp_path, {"num_stages": 4}, **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert log_of(resumed)[5:-1] == want[5:-1]
    for name, value in state.items():
        assert torch.equal(value, state_of(resumed)[name]), name


def test_checkpoints_are_sources_for_from_pretrained(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"save_strategy": "epoch", "max_steps": 3}
    trainer = piped(TASKS["gpt2"], tmp_path, TWO, **arguments)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    for folder in ("checkpoint-3", "last"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert_same_state(loaded.state_dict(), state_of(trainer), within=0)
    adapted = piped(TASKS["lora"], tmp_path / "lora", TWO, **arguments)
    base = tmp_path / "base"
    adapted.model.get_base_model().save_pretrained(base)
    adapted.model.peft_config["default"].base_model_name_or_path = str(base)
    adapted.train()
    state = state_of(adapted)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora" / "checkpoint-3")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]) or "lora" not in name, name
    assert any("lora_A" in name for name in loaded.state_dict())


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it is not the last one
        "optim": "sgd",
        "learning_rate": 0.3,
    }
    trainer = piped(VIT, tmp_path, {**TWO, "schedule": "1f1b"}, **arguments)
    trainer.train()
    assert trainer.state.best_global_step < 6
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    # The stock Trainer itself loads nothing here: it saves weights of a ViT under other names.
    best = trainer.state.best_model_checkpoint
    saved = transformers.ViTForImageClassification.from_pretrained(best)
    assert_same_state(state_of(trainer), saved.state_dict(), within=0)


def test_every_trial_of_a_search_has_a_pipeline_of_its_own(tmp_path: Path) -> None:
    task = TrainerTask(lambda: None, VIT.row)  # type: ignore[arg-type, return-value]
    options = {"model_init": VIT.model}
    trainers = (
        piped(task, tmp_path, {**TWO, "schedule": "1f1b"}, options=options, max_steps=2),
        stock(task, tmp_path, options=options, max_steps=2),
    )
    for trainer in trainers:
        trainer.train()
        first = log_of(trainer)
        trainer.train()
        assert_same_log(log_of(trainer), first)
    assert_same_log(*map(log_of, trainers))
