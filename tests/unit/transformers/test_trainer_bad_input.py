"""What PipelineTrainer refuses, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")

from pipedream2bw.errors import StageError
from pipedream2bw.extras.transformers import PipelineTrainer
from tests.runs.trainers import log_of, piped, stock
from tests.samples.trainer_tasks import TASKS

TWO = {"num_stages": 2, "schedule": "1f1b"}
VIT, LLAMA, T5 = TASKS["vit"], TASKS["llama"], TASKS["t5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: True, a pipeline cannot obey it"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: 5.0, a pipeline cannot"),
        ({"use_liger_kernel": True}, "use_liger_kernel: True"),
        ({"use_cache": True}, "use_cache: True"),
        ({"debug": "underflow_overflow"}, "debug: .*a pipeline cannot obey it"),
        ({"bf16_full_eval": True}, "bf16_full_eval: True"),
        ({"push_to_hub": True}, "push_to_hub: True"),
        ({"save_on_each_node": True}, "save_on_each_node: True"),
        ({"torch_empty_cache_steps": 3}, "torch_empty_cache_steps: 3"),
        ({"optim": "lomo"}, "optim: 'lomo', a pipeline knows adamw_torch, "),
        ({"optim": "galore_adamw_layerwise"}, "optim: 'galore_adamw_layerwise', a pipeline knows"),
        (
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"every_n_layers": 2},
            },
            r"activation_checkpointing_kwargs: \['every_n_layers'\], a pipeline recomputes whole",
        ),
        (
            {"activation_checkpointing": True, "torch_compile": True},
            "torch_compile: True, activation_checkpointing: True: .*choose one",
        ),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "num_steps: 2, gradient_accumulation_steps: 4",
        ),
        (
            {"accelerator_config": {"dispatch_batches": True}},
            "dispatch_batches: True, it must be False",
        ),
        (
            {
                "load_best_model_at_end": True,
                "save_only_model": True,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
            },
            "save_only_model: True, load_best_model_at_end: True",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_a_pipeline_cannot_obey_are_named(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        piped(VIT, tmp_path, TWO, **arguments)


def test_options_that_are_no_dictionary_are_named(tmp_path: Path) -> None:
    given = VIT.arguments(tmp_path)
    with pytest.raises(TypeError, match="pipeline: 2 given, it must be a dict"):
        PipelineTrainer(**given, pipeline=2)
    with pytest.raises(TypeError, match=r"pipeline_optimizer: \[1\] given, it must be a dict"):
        PipelineTrainer(**given, pipeline=TWO, pipeline_optimizer=[1])


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "parallelism_config"])
def test_other_ways_to_distribute_are_named(name: str, tmp_path: Path) -> None:
    given = VIT.arguments(tmp_path)
    setattr(given["args"], name, {"some": "thing"})  # their own checks need what is not installed
    with pytest.raises(ValueError, match=f"{name}: .*some.*, a pipeline cannot obey it"):
        piped(VIT, tmp_path, TWO, options=given)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            {"num_stages": 8},
            "gradient_accumulation_steps: 4, .*num_microbatches: 4.* Raise it, and",
        ),
        ({**TWO, "num_microbatches": 2}, "num_microbatches: 2 given: gradient_accumulation_steps"),
        ({**TWO, "normalizer": True}, "normalizer: True given: the Trainer counts"),
        ({"num_stages": "auto"}, "num_stages: 'auto', stages_per_rank: 1"),
        ({"num_stages": 3, "stages_per_rank": 2}, "num_stages: 3, stages_per_rank: 2"),
        ({}, "num_stages: None"),
        ({"stages": 2}, "pipeline: stages: PipelineModule has no such option. Give the names"),
        ({**TWO, "width": 2}, "processes: 1, num_stages: 2, .*width: 2: 2 processes are needed"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    pipeline: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        piped(VIT, tmp_path, pipeline)


def test_processes_that_the_trainer_does_not_see_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = VIT.arguments(tmp_path)  # whose processes are counted now
    assert given["args"].world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="processes: 2 of torchrun, 1 of TrainingArguments"):
        PipelineTrainer(VIT.model(), pipeline=TWO, **given)


def test_labels_of_another_length_are_refused_and_the_pipeline_stays_open(tmp_path: Path) -> None:
    trainer = piped(LLAMA, tmp_path, TWO, train_sampling_strategy="sequential", max_steps=1)
    good = list(trainer.train_dataset)
    row = good[7]  # the longer one of the microbatch
    trainer.train_dataset = [*good[:7], {**row, "labels": row["labels"][:-1]}, *good[8:]]
    message = r"microbatch 3: labels of shape \[2, 7\], input_ids of shape \[2, 8\]"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    trainer.train_dataset = good
    trainer.train()
    assert len(log_of(trainer)) == 2


def test_a_batch_of_no_items_contributes_nothing(tmp_path: Path) -> None:
    trainer = piped(LLAMA, tmp_path, TWO, max_steps=1, logging_nan_inf_filter=False)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for row in trainer.train_dataset:
        row["labels"] = torch.full_like(row["labels"], -100)
    trainer.train()
    assert log_of(trainer)[0]["loss"] == 0
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_whose_outputs_have_no_names_is_refused(tmp_path: Path) -> None:
    model = LLAMA.model()
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict: False, it must be True"):
        PipelineTrainer(model, pipeline=TWO, **LLAMA.arguments(tmp_path))


def test_predictions_of_an_encoder_decoder_need_labels(tmp_path: Path) -> None:
    trainer = piped(T5, tmp_path, TWO, max_steps=1)
    trainer.train()
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in T5.data(2)]
    with pytest.raises(ValueError, match="labels: missing, the model makes its decoder's input"):
        trainer.predict(rows)


def test_a_loss_that_calls_the_model_twice_is_refused(tmp_path: Path) -> None:
    trainer = piped(VIT, tmp_path, TWO, max_steps=1)

    def twice(model: Any, inputs: Any, **kwargs: Any) -> Any:
        return model(**inputs)["loss"] + model(**inputs)["loss"]

    trainer.compute_loss = twice
    with pytest.raises(StageError, match="called the model twice"):
        trainer.train()


def test_only_a_pipelines_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    theirs = stock(VIT, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    theirs.train()
    with pytest.raises(ValueError, match=r"checkpoint-1, it has no folder step-"):
        piped(VIT, tmp_path, TWO, max_steps=2).train(resume_from_checkpoint=True)


def test_importing_the_package_imports_no_transformers() -> None:
    code = "import sys, pipedream2bw.extras; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_missing_packages_are_named() -> None:
    code = """
import sys
sys.modules["accelerate"] = None
try:
    import pipedream2bw.extras.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install pipedream2bw[transformers]" in done.stdout
