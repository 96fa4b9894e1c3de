"""Gradients that are kept in bfloat16: every sum is rounded, and the bits are the definition's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import pipedream2bw as pd2
from tests.references.mixed_oracle import MixedOracle, clip_norm, half_away, lowered
from tests.references.oracle import Batch
from tests.runs.trajectory import Trajectory, assert_same, copy_of, go_on, make_pipeline
from tests.samples.models import Task
from tests.unit.optimizer.test_loss_scale import OwnAdam
from tests.unit.training.test_precision import (
    GPT,
    MLP,
    OF_MASTERS,
    SKIPS,
    define,
    float_loss,
    sgd,
    train,
)

NUM_BATCHES = 6
NARROW: dict[str, Any] = {"precision": "bf16", "gradient_dtype": torch.bfloat16}
defined = functools.partial(define, narrow=True)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "m"),
    [("2bw", 1, 2), ("2bw", 2, 2), ("2bw", 4, 5), ("1f1b", 4, 3), ("2bw_split", 2, 3)],
)
def test_sgd_is_the_definitions_to_the_bit(schedule: str, num_stages: int, m: int) -> None:
    for task in (MLP, SKIPS, GPT):
        batches = task.batches([2 * m] * NUM_BATCHES)
        want = defined(task, batches, m, schedule=schedule)
        assert_same(train(task, batches, num_stages, m, schedule=schedule, **NARROW), want)
        wide = define(task, batches, m, schedule=schedule)
        assert any(not torch.equal(wide.state[name], want.state[name]) for name in want.state)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("make", OF_MASTERS)
def test_optimizers_step_the_masters(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], schedule: str
) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = defined(SKIPS, batches, 3, make, schedule=schedule)
    got = train(SKIPS, batches, 3, 3, make, schedule=schedule, **NARROW)
    assert_same(got, want, exact=False)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_with_split_masters_all_that_a_step_writes_and_reads_has_16_bits(num_stages: int) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = defined(SKIPS, batches, 3, round_to=half_away)
    assert_same(train(SKIPS, batches, num_stages, 3, split_master=True, **NARROW), want)


def own_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    class OwnSgd(SGD):
        """No fused pass knows it."""

    return OwnSgd(parameters, lr=0.3, momentum=0.5)


CLIPS: list[tuple[dict[str, Any], Callable[[list[nn.Parameter]], object]]] = [
    ({"max_grad_norm": 0.1}, lambda ps: clip_norm(ps, 0.1)),
    ({"max_grad_norm": 0.1, "norm_type": math.inf}, lambda ps: clip_norm(ps, 0.1, math.inf)),
    ({"max_grad_norm": 0.1, "norm_type": 3.0}, lambda ps: clip_norm(ps, 0.1, 3.0)),
    ({"clip_grad_value": 0.013}, lambda ps: nn.utils.clip_grad_value_(ps, 0.013)),
]


@pytest.mark.parametrize("make", [sgd, own_sgd])
@pytest.mark.parametrize(("options", "clip"), CLIPS)
def test_clipping_rounds_to_bfloat16(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    options: dict[str, Any],
    clip: Callable[[list[nn.Parameter]], object],
) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = defined(SKIPS, batches, 3, make, clip=clip)
    got = train(SKIPS, batches, 3, 3, make, opt_options=options, recompute=True, **NARROW)
    assert_same(got, want)
    unclipped = defined(SKIPS, batches, 3, make)
    assert any(not torch.equal(unclipped.state[name], want.state[name]) for name in want.state)


SCALE = 3.0 * 2**100
"""No power of two, so that taking it off rounds."""


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_scale_is_taken_off_in_bfloat16(schedule: str, clips: bool) -> None:
    """Of the two batches that overflow no step is made."""
    batches = SKIPS.batches([6] * NUM_BATCHES)
    for number in (1, 3):
        batches[number].args[0][1] *= 1e12
    norms: list[float] = []

    def clip(parameters: list[nn.Parameter]) -> None:
        norms.append(clip_norm(parameters, 0.05).item() if clips else 0.0)

    model = SKIPS.model()
    oracle = MixedOracle(
        model,
        lowered(model, torch.bfloat16),
        sgd(model.parameters()),
        3,
        SKIPS.loss_fn,
        int(schedule == "2bw"),
        dtype=torch.bfloat16,
        narrow=True,
        scale=SCALE,
        growth_interval=2,
        clip=clip,
    )
    want = [oracle.train_step(batch) for batch in batches]
    assert oracle.num_overflows == 2
    with make_pipeline(SKIPS, 3, 3, batches[0], schedule=schedule, **NARROW) as pipe:
        opt = pd2.PipelineOptimizer(
            sgd(pipe.parameters()),
            loss_scale=pd2.LossScale(SCALE, growth_interval=2),
            max_grad_norm=0.05 if clips else None,
        )
        losses, scales, ours = [], [], []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            scales.append(opt.loss_scale)
            ours.append(float(opt.grad_norm) if clips and schedule == "1f1b" else 0.0)
        state = copy_of(pipe.state_dict())
        assert [float(scale) for scale in scales] == oracle.scales[1:]
        assert not any(ours) or [x for x in ours if math.isfinite(x)] == norms
        assert_same(
            Trajectory([float(loss) for loss in losses], state),
            Trajectory(want, copy_of(model.state_dict())),
        )


class Normed(nn.Module):
    """Statistics, and what scales them, stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return result


def test_gradients_of_float32_weights_stay_in_float32() -> None:
    task = Task(
        Normed, lambda rows: Batch((torch.randn(rows, 8),), torch.randn(rows, 3)), float_loss
    )
    batches = task.batches([12] * NUM_BATCHES)
    model = task.model()
    low = lowered(model, torch.bfloat16)
    oracle = MixedOracle(
        model, low, sgd(model.parameters()), 3, float_loss, 1, dtype=torch.bfloat16, narrow=True
    )
    want = [oracle.train_step(batch) for batch in batches]
    with make_pipeline(task, 3, 3, batches[0], **NARROW) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        got = go_on(pipe, opt, batches)
        assert [report.gradients for report in pipe.memory_report().values()] == [
            2 * 72, 4 * 16, 2 * 27
        ]  # fmt: skip
    assert got.losses == want
    for name, parameter in model.named_parameters():
        assert torch.equal(got.state[name], parameter), name


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "chimera"},
        {"schedule": "interleaved_2bw", "stages_per_rank": 2},
        {"accumulate": 2},
        {"warmup_batches": 2},
        {"optimizer_device": "cpu"},
    ],
)
def test_other_options_train_alike(options: dict[str, Any]) -> None:
    """Chimera's copies of a stage stay equal; buffers take turns in every way."""
    batches = MLP.batches([8] * NUM_BATCHES)
    losses = {}
    for how, given in (("narrow", NARROW), ("wide", {"precision": "bf16"})):
        with make_pipeline(MLP, 4, 4, batches[0], **given, **options) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            losses[how] = []
            for number, batch in enumerate(batches):
                losses[how].append(pipe.train_step(*batch.args, target=batch.target))
                if (number + 1) % options.get("accumulate", 1) == 0:
                    opt.step()
            losses[how] = [float(loss) for loss in losses[how]]
    for narrow, wide in zip(losses["narrow"], losses["wide"], strict=True):
        assert narrow == pytest.approx(wide, rel=0.02)
    assert losses["narrow"] != losses["wide"]


def test_where_gradients_and_state_are_changes_no_bit() -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = train(SKIPS, batches, 3, 3, **NARROW)
    on_host = {"optimizer_device": "cpu", **NARROW}
    assert_same(train(SKIPS, batches, 3, 3, flush_after=[1], **on_host), want)


def test_draining_and_other_optimizers_change_no_number() -> None:
    """Gradients that wait for their step are moved between the buffers that take turns."""
    batches = SKIPS.batches([6] * NUM_BATCHES)

    def stateless(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return SGD(parameters, lr=0.3)

    want = train(SKIPS, batches, 3, 3, stateless, **NARROW)
    with make_pipeline(SKIPS, 3, 3, batches[0], **NARROW) as pipe:
        opt = pd2.PipelineOptimizer(stateless(pipe.parameters()))
        losses = []
        for number, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            if number % 2:
                pipe.flush()
                if number % 4 == 1:
                    opt = pd2.PipelineOptimizer(own(pipe.parameters()), max_grad_norm=math.inf)
                else:
                    opt = pd2.PipelineOptimizer(stateless(pipe.parameters()))
            opt.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    assert_same(got, want)


def own(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    class Own(SGD):
        """No fused pass knows it."""

    return Own(parameters, lr=0.3)


@pytest.mark.parametrize(("split", "bytes_each"), [(False, 18), (True, 16)])
def test_adam_takes_two_bytes_less_per_parameter(split: bool, bytes_each: int) -> None:
    batches = MLP.batches([4] * 3)
    with make_pipeline(MLP, 2, 2, batches[0], split_master=split, **NARROW) as pipe:
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()))
        go_on(pipe, opt, batches)
        reports = pipe.memory_report().values()
        kinds = ("weights", "masters", "gradients", "optimizer_state")
        held = sum(getattr(report, kind) for report in reports for kind in kinds)
        assert held == bytes_each * sum(p.numel() for p in pipe.parameters())
        storages = {}
        for stage in pipe.session.stages:
            for slot in range(stage.weights.engine.num_slots):
                for tensor in stage.weights.engine.slot_buffers(slot):
                    storages[tensor.data_ptr()] = tensor.nbytes
            assert stage.weights.engine.num_slots == 3, "gradients have no buffer of their own"


def test_overflows_leave_an_own_optimizers_state() -> None:
    batches = SKIPS.batches([6] * 4)
    batches[1].args[0][1] *= 1e12
    with make_pipeline(SKIPS, 3, 3, batches[0], **NARROW) as pipe:
        scale = pd2.LossScale(2.0**100, growth_interval=50)
        opt = pd2.PipelineOptimizer(OwnAdam(pipe.parameters(), lr=0.01), loss_scale=scale)
        go_on(pipe, opt, batches)
        assert {float(state["step"]) for state in opt.state_dict()["state"].values()} == {3.0}


def test_a_small_gpt_learns_as_in_float32() -> None:
    tokens = torch.arange(5).repeat(8, 1) + torch.arange(8).unsqueeze(1)
    batch = Batch((tokens % 13,), (tokens + 1) % 13)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW(parameters, lr=0.01)

    wanted: Sequence[float] = train(GPT, [batch] * 40, 2, 2, make).losses
    losses = train(GPT, [batch] * 40, 2, 2, make, **NARROW).losses
    for mine, theirs in zip(losses, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)
