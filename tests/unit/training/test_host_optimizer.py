"""The optimizer in the host's memory: the bits, the bytes, and what it refuses.

A CPU's stages have their optimizer there anyway, so here they are told that they are elsewhere: the
same copies are made, which are of no use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import pipedream2bw as pd2
from pipedream2bw.runtime import local_stages
from tests.references.mixed_oracle import half_away
from tests.runs.discarding import Failure, batches
from tests.runs.discarding import train as train_failing
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    copy_of,
    go_on,
    make_pipeline,
)
from tests.samples.models import Task
from tests.samples.tied_models import TIED
from tests.unit.runtime.test_discarded_batches import COUNT, ROWS, check
from tests.unit.training.test_precision import (
    GPT,
    MLP,
    NUM_BATCHES,
    SKIPS,
    define,
    float_token_loss,
    sgd,
    train,
)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ON_HOST: dict[str, Any] = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}


@pytest.fixture(autouse=True)
def stages_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stages, "is_apart_from_host", lambda device: True)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "m", "options"),
    [
        ("2bw", 1, 2, {}),
        ("2bw", 4, 5, {}),
        ("1f1b", 4, 3, {}),
        ("gpipe", 2, 3, {}),
        ("2bw_split", 2, 3, {}),
        ("interleaved_2bw", 4, 4, {"stages_per_rank": 2}),
    ],
)
def test_sgd_is_the_definitions_to_the_bit(
    schedule: str, num_stages: int, m: int, options: dict[str, Any]
) -> None:
    for task in (SKIPS, GPT):
        batches = task.batches([2 * m] * NUM_BATCHES)
        given = {"schedule": schedule, **options, **ON_HOST}
        whole = by_oracle(task, batches, m, sgd, schedule=schedule)
        assert_same(train(task, batches, num_stages, m, **given), whole)
        want = define(task, batches, m, schedule=schedule)
        assert_same(train(task, batches, num_stages, m, precision="bf16", **given), want)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: Adam(ps, lr=0.01),
        lambda ps: AdamW(ps, lr=0.01, amsgrad=True),
        lambda ps: SGD(ps, lr=0.3, momentum=0.9, nesterov=True),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "2bw"},
        {"schedule": "1f1b", "precision": "fp16"},
        {"schedule": "pipedream"},
        {"schedule": "chimera", "precision": "bf16"},
        {"schedule": "2bw", "precision": "bf16", "split_master": True},
        {"schedule": "2bw", "precision": "bf16", "opt_options": {"max_grad_norm": 0.1}},
        {"schedule": "2bw", "opt_options": {"clip_grad_value": 0.01}},
        {"schedule": "2bw", "precision": "bf16", "recompute": True},
        {"schedule": "2bw", "precision": "bf16", "warmup_batches": 2, "flush_after": [0, 3]},
        {
            "schedule": "2bw",
            "precision": "fp16",
            "opt_options": {"loss_scale": pd2.LossScale(2.0**20, growth_interval=2)},
        },
    ],
    ids=str,
)
def test_it_is_the_devices_optimizer_to_the_bit(
    make: MakeOptimizer, options: dict[str, Any]
) -> None:
    m = 1 if options["schedule"] == "pipedream" else 4
    batches = SKIPS.batches([2 * m] * NUM_BATCHES)
    want = train(SKIPS, batches, 4, m, make, **options)
    assert_same(train(SKIPS, batches, 4, m, make, **options, **ON_HOST), want)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_tied_gradients_are_summed(schedule: str, precision: str | None) -> None:
    task = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)
    batches = task.batches([8] * NUM_BATCHES)
    options: dict[str, Any] = {
        "schedule": schedule,
        "split": ["blocks.2"],
        "precision": precision,
        "opt_options": {"max_grad_norm": 0.3},
    }
    want = train(task, batches, 2, 4, **options)
    assert_same(train(task, batches, 2, 4, **options, **ON_HOST), want)


def test_split_masters_round_as_they_do_elsewhere() -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = define(SKIPS, batches, 3, round_to=half_away)
    options: dict[str, Any] = {"precision": "bf16", "split_master": True}
    assert_same(train(SKIPS, batches, 3, 3, **options, **ON_HOST), want)


@pytest.mark.parametrize(
    ("precision", "split", "on_device", "on_host"),
    [(None, False, 12, 16), ("bf16", False, 8, 18), ("bf16", True, 8, 16)],
)
def test_the_device_keeps_few_bytes_per_parameter(
    precision: str | None, split: bool, on_device: int, on_host: int
) -> None:
    batches = MLP.batches([4] * 3)
    options = {"precision": precision, "split_master": split, **ON_HOST}
    with make_pipeline(MLP, 2, 2, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()))
        go_on(pipe, opt, batches)
        elements = sum(p.numel() for p in pipe.parameters())
        reports = pipe.memory_report().values()
        there = sum(each.weights + each.gradients for each in reports)
        here = sum(each.masters + each.optimizer_state + each.host_copies for each in reports)
        assert (there, here) == (on_device * elements, on_host * elements)
        for each in reports:
            assert here <= sum(each.on_host for each in reports) <= here + each.padding * 4
            assert each.on_device == each.total - each.on_host


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_saving_and_loading_loses_nothing(precision: str | None, tmp_path: Path) -> None:
    given = SKIPS.batches([6] * NUM_BATCHES)
    options: dict[str, Any] = {"precision": precision, "schedule": "1f1b", **ON_HOST}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Adam(parameters, lr=0.01)

    whole = train(SKIPS, given, 3, 3, make, **options)
    with make_pipeline(SKIPS, 3, 3, given[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        weights, moments = go_on(pipe, opt, given[:3]).state, copy.deepcopy(opt.state_dict())
        pd2.save(tmp_path / "saved", pipe, opt).wait()
    for way in ("state_dict", "checkpoint"):
        model = SKIPS.model(seed=6)
        with make_pipeline(SKIPS, 3, 3, given[0], model=model, **options) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            if way == "state_dict":
                pipe.load_state_dict(weights)
                opt.load_state_dict(moments)
            else:
                pd2.load(tmp_path / "saved", pipe, opt)
            got = go_on(pipe, opt, given[3:])
            assert_same(got, Trajectory(whole.losses[3:], whole.state))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_is_written_to_a_drained_pipelines_weights_is_stepped(precision: str | None) -> None:
    given = MLP.batches([4] * 3)
    with make_pipeline(MLP, 2, 2, given[0], precision=precision, **ON_HOST) as pipe:
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.0))
        for batch in given:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            pipe.flush()
            name, parameter = next(iter(pipe.named_parameters()))
            before = copy_of(pipe.state_dict())
            with torch.no_grad():
                parameter.view(-1)[0] += 1
        after = pipe.state_dict()
        assert after[name].view(-1)[0] == pytest.approx(float(before[name].view(-1)[0]) + 1)
        before[name].view(-1)[0] = after[name].view(-1)[0]
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_failing_batch_is_discarded(part: str) -> None:
    given = batches(COUNT, ROWS)
    options: dict[str, Any] = {"num_stages": 4, "num_microbatches": 4}
    outcome = train_failing(given, [Failure(1, part, 14)], schedule="2bw", **options, **ON_HOST)
    check(outcome, given, delay=1, **options)


@pytest.mark.parametrize(
    ("make", "opt_options", "message"),
    [
        (RMSprop, {}, r"optimizer_device: 'cpu', optimizer: RMSprop of torch.float32"),
        (
            lambda ps: Adam(ps, capturable=True),
            {},
            r"optimizer_device: 'cpu', optimizer: Adam of torch.float32",
        ),
        (SGD, {"staleness": pd2.NesterovCorrection()}, r"optimizer_device: 'cpu', staleness: Nest"),
    ],
)
def test_what_cannot_step_there_is_refused(
    make: MakeOptimizer, opt_options: dict[str, Any], message: str
) -> None:
    (batch,) = MLP.batches([4])
    with (
        make_pipeline(MLP, 2, 2, batch, optimizer_device="cpu") as pipe,
        pytest.raises(ValueError, match=message),
    ):
        pd2.PipelineOptimizer(make(pipe.parameters()), **opt_options)


@pytest.mark.parametrize(("device", "error"), [("cuda", ValueError), (3, TypeError)])
def test_other_devices_are_refused(device: Any, error: type[Exception]) -> None:
    (batch,) = MLP.batches([4])
    with pytest.raises(error, match=f"optimizer_device: '?{device}"):
        make_pipeline(MLP, 2, 2, batch, optimizer_device=device)


def test_on_the_cpu_it_is_where_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (batch,) = MLP.batches([4])
    with make_pipeline(MLP, 2, 2, batch, optimizer_device="cpu") as pipe:
        assert all(each.host_copies == each.on_host == 0 for each in pipe.memory_report().values())
