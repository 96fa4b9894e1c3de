"""Every option gives the same bits on devices as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.device.on_device import batch_on, on
from tests.device.test_host_optimizer import OPTIMIZERS, PRECISIONS, train
from tests.runs.trajectory import assert_same, go_on, make_pipeline
from tests.samples.models import Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss

DEVICES = ["checked:0", "cpu"]


def check(task: Task, num_stages: int, m: int, optimizer: str, **options: Any) -> None:
    got, want = (
        train(task, m, OPTIMIZERS[optimizer], num_stages=num_stages, device=device, **options)
        for device in DEVICES
    )
    assert_same(got, want)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "chimera", "pipedream"])
def test_optimizers_and_precisions(schedule: str, optimizer: str, precision: str) -> None:
    m = 1 if schedule == "pipedream" else 4
    check(SKIPS, 4, m, optimizer, schedule=schedule, **PRECISIONS[precision])


@pytest.mark.parametrize("precision", ["float32", "split", "narrow"])
@pytest.mark.parametrize(
    "options",
    [
        {"opt_options": {"max_grad_norm": 0.1}},
        {"opt_options": {"max_grad_norm": 0.1}, "schedule": "1f1b"},
        {"opt_options": {"max_grad_norm": 0.1}, "schedule": "chimera"},
        {"opt_options": {"clip_grad_value": 0.01}, "flush_after": [2]},
        {"opt_options": {"loss_scale": pd2.LossScale(2.0**20, growth_interval=2)}},
        {"opt_options": {"staleness": pd2.LearningRateDiscount(3)}},
        {"opt_options": {"staleness": pd2.ErrorFeedback(0.8)}},
        {"opt_options": {"staleness": pd2.ErrorFeedback(dtype=torch.bfloat16)}},
        {"spare_buffer": True, "recompute": True},
        {"warmup_batches": 2},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], precision: str) -> None:
    m = 4 if options.get("schedule") == "chimera" else 5
    check(SKIPS, 4, m, "adam", **PRECISIONS[precision], **options)


@pytest.mark.parametrize("schedule", ["2bw", "chimera", "1f1b"])
def test_tied_gradients_are_summed(schedule: str) -> None:
    task = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)
    check(task, 2, 4, "adam", schedule=schedule, split=["blocks.2"])


@pytest.mark.parametrize(("device", "num_kept"), [("checked:0", 1), ("cpu", 0)])
@pytest.mark.parametrize(("precision", "num_lifted"), [("float32", 0), ("bf16", 2), ("narrow", 0)])
def test_gradients_that_wait_to_be_added_are_reported(
    device: str, num_kept: int, precision: str, num_lifted: int
) -> None:
    """All of a backward's; those of 16 bits become float32 before they are added to such."""
    batches = [batch_on(batch, device) for batch in SKIPS.batches([4] * 2)]
    task = SKIPS if device == "cpu" else on(SKIPS, device)
    with make_pipeline(task, 2, 2, batches[0], **PRECISIONS[precision]) as pipe:
        go_on(pipe, pd2.PipelineOptimizer(OPTIMIZERS["sgd"](pipe.parameters())), batches)
        pipe.flush()
        for each in pipe.memory_report().values():
            assert each.weights > 0
            want = num_kept * (1 + num_lifted) * each.weights // 2
            # What is float32 for a moment begins on a boundary for each parameter.
            assert want <= each.kept_gradients <= want + (512 * 8 if want and num_lifted else 0)
