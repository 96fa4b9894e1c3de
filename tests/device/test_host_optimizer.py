"""The optimizer in the host's memory while the stages are on the checked device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import pipedream2bw as pd2
from tests.device.on_device import batch_on, check_on_device, on, places
from tests.exhaustive import exhaustive
from tests.runs.trajectory import Trajectory, assert_same, copy_of, go_on, make_pipeline
from tests.samples.models import Task
from tests.samples.schedule_sizes import sizes_for
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss

NUM_BATCHES = 6
ON_HOST: dict[str, Any] = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda ps: SGD(ps, lr=0.3, momentum=0.9, nesterov=True),
    "adam": lambda ps: Adam(ps, lr=0.01, foreach=False),
    "adamw": lambda ps: AdamW(ps, lr=0.01, amsgrad=True, foreach=False),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "split": {"precision": "bf16", "split_master": True},
    "narrow": {"precision": "bf16", "gradient_dtype": torch.bfloat16},
}


def train(
    task: Task,
    m: int,
    make: MakeOptimizer,
    *,
    num_stages: int,
    device: str,
    opt_options: dict[str, Any] | None = None,
    flush_after: Collection[int] = (),
    **options: Any,
) -> Trajectory:
    """Trains on a device, "cpu" or two checked ones; the state is the host's."""
    batches = [batch_on(batch, device) for batch in task.batches([2 * m] * NUM_BATCHES)]
    if device != "cpu":
        task = on(task, device)
        options["devices"] = places(num_stages, 2)
    with make_pipeline(task, num_stages, m, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **opt_options or {})
        return go_on(pipe, opt, batches, flush_after=flush_after).on_host()


def check(task: Task, num_stages: int, m: int, make: MakeOptimizer, **options: Any) -> None:
    """The device's stages with the optimizer on the host, and all of it on the CPU: equal bits."""
    want = train(task, m, make, num_stages=num_stages, device="cpu", **options)
    got = train(task, m, make, num_stages=num_stages, device="checked:0", **options, **ON_HOST)
    assert_same(got, want)


@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_every_schedule_is_the_oracles(schedule: str) -> None:
    sizes = next(iter(sizes_for(schedule, 4)))
    m = sizes.num_microbatches
    check_on_device(
        SKIPS,
        4,
        m,
        [2 * m] * (7 if m == 1 else 5),
        num_devices=2,
        schedule=schedule,
        stages_per_rank=sizes.stages_per_rank,
        **ON_HOST,
    )


@pytest.mark.parametrize(
    ("schedule", "optimizer", "precision"),
    [
        pytest.param(*each, marks=() if is_often else pytest.mark.exhaustive)
        for number, each in enumerate(
            itertools.product(pd2.schedule_names(), OPTIMIZERS, PRECISIONS)
        )
        if (is_often := number % 7 == 0 or each[0] == "2bw") or number % 3 == 0 or each[0] == "1f1b"
    ],
)
def test_it_is_the_cpus_optimizer_to_the_bit(schedule: str, optimizer: str, precision: str) -> None:
    sizes = next(iter(sizes_for(schedule, 4)))
    options = {"schedule": schedule, "stages_per_rank": sizes.stages_per_rank}
    options |= PRECISIONS[precision]
    check(SKIPS, 4, sizes.num_microbatches, OPTIMIZERS[optimizer], **options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"opt_options": {"max_grad_norm": 0.1}},
        {"opt_options": {"clip_grad_value": 0.01}, "flush_after": [2]},
        {"recompute": True},
        {"warmup_batches": 2},
        {"opt_options": {"max_grad_norm": 0.1}, "schedule": "1f1b"},
        {"opt_options": {"loss_scale": pd2.LossScale(2.0**20, growth_interval=2)}},
        {"opt_options": {"staleness": pd2.LearningRateDiscount(3)}},
        {"opt_options": {"staleness": pd2.ErrorFeedback(0.8)}},
        {"graphs": "auto"},
    ],
    ids=str,
)
def test_every_option_is_the_cpus(options: dict[str, Any], precision: str) -> None:
    check(SKIPS, 4, 5, OPTIMIZERS["adam"], **PRECISIONS[precision], **options)


FETCHED = "the batch's gradients go to the host"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("m", "bucket_cap_mb"), [(2, 1e-4), (3, 1e-4), (2, 25.0)])
def test_a_backward_whose_gradients_are_fetched_in_it_is_not_recorded(
    m: int, bucket_cap_mb: float, precision: str
) -> None:
    make = OPTIMIZERS["sgd"]
    want = train(SKIPS, m, make, num_stages=2, device="cpu", **PRECISIONS[precision])
    options: dict[str, Any] = {**ON_HOST, **PRECISIONS[precision], "bucket_cap_mb": bucket_cap_mb}
    task = on(SKIPS, "checked:0")
    batches = [batch_on(batch, "checked:0") for batch in task.batches([2 * m] * NUM_BATCHES)]
    devices = places(2, 2)
    with make_pipeline(task, 2, m, batches[0], devices=devices, graphs=True, **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        assert_same(go_on(pipe, opt, batches).on_host(), want)
        reports = pipe.graph_report().values()
    are_early = bucket_cap_mb < 1  # otherwise all gradients are one bucket
    for report in reports:
        assert report.backwards > 0
        assert (FETCHED in report.others) == are_early
        if are_early:
            assert report.backwards <= NUM_BATCHES * (m - 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["2bw", "chimera", *exhaustive("1f1b")])
def test_tied_gradients_are_summed(schedule: str, precision: str) -> None:
    task = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)
    options: dict[str, Any] = {"schedule": schedule, "split": ["blocks.2"]}
    check(task, 2, 4, OPTIMIZERS["adam"], **options, **PRECISIONS[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_saving_and_loading_leaves_the_state_on_the_host(precision: str, tmp_path: Path) -> None:
    options = {"schedule": "1f1b", "devices": places(2, 2), **PRECISIONS[precision], **ON_HOST}
    task = on(SKIPS, "checked:0")
    batches = [batch_on(batch, "checked:0") for batch in task.batches([6] * NUM_BATCHES)]
    make = OPTIMIZERS["adam"]

    with make_pipeline(task, 2, 3, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        weights = go_on(pipe, opt, batches[:3]).on_host().state
        moments = copy.deepcopy(opt.state_dict())
        pd2.save(tmp_path / "saved", pipe, opt).wait()
        want = go_on(pipe, opt, batches[3:])
    for values in moments["state"].values():
        assert {value.device.type for value in values.values()} == {"cpu"}
    for way in ("state_dict", "checkpoint"):
        with make_pipeline(task, 2, 3, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            if way == "state_dict":
                pipe.load_state_dict(weights)
                opt.load_state_dict(moments)
            else:
                pd2.load(tmp_path / "saved", pipe, opt)
            assert_same(go_on(pipe, opt, batches[3:]), want)
            for values in opt.state_dict()["state"].values():
                assert {value.device.type for value in values.values()} == {"cpu"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_written_to_a_drained_pipelines_weights_is_stepped(precision: str) -> None:
    task = on(SKIPS, "checked:0")
    batches = [batch_on(batch, "checked:0") for batch in task.batches([4] * 3)]
    with make_pipeline(task, 2, 2, batches[0], **PRECISIONS[precision], **ON_HOST) as pipe:
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.0))
        name, parameter = next(iter(pipe.named_parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            before = copy_of(pipe.state_dict())
            with torch.no_grad():
                parameter.view(-1)[0] = 3.0
        pipe.train_step(*batches[0].args, target=batches[0].target)
        opt.step()
        after = pipe.state_dict()
        for key, tensor in before.items():
            if key == name:
                tensor.view(-1)[0] = 3.0
            assert torch.equal(after[key].cpu(), tensor.cpu()), key


def test_nothing_of_it_counts_on_the_device() -> None:
    task = on(SKIPS, "checked:0")
    batches = [batch_on(batch, "checked:0") for batch in task.batches([4] * 3)]
    with make_pipeline(task, 2, 2, batches[0], precision="bf16", **ON_HOST) as pipe:
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()))
        go_on(pipe, opt, batches)
        elements = sum(p.numel() for p in pipe.parameters())
        reports = pipe.memory_report().values()
        assert sum(each.weights + each.gradients for each in reports) == 8 * elements
        stages = pipe.session.stages
        assert {b.device.type for s in stages for b in s.weights.engine.master_buffers()} == {"cpu"}
