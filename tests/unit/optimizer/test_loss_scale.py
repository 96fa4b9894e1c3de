"""Loss scaling: a scale belongs to a weight version, and all stages agree on what overflows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

import pipedream2bw as pd2
from tests.references.mixed_oracle import MixedOracle, lowered
from tests.references.oracle import Batch
from tests.runs.trajectory import assert_same_state, copy_of, make_pipeline
from tests.unit.training.test_precision import SKIPS, sgd

SCALE = pd2.LossScale(init_scale=1024.0, growth_interval=3)


def with_outliers(at: Sequence[int], count: int = 10) -> list[Batch]:
    """Batches, of which some have rows whose gradients no float16 can hold."""
    batches = SKIPS.batches([6] * count)
    for number in at:
        batches[number].args[0][1] *= 3e4
    return batches


def oracle_of(make: Any = sgd, delay: int = 1, m: int = 3, **options: Any) -> MixedOracle:
    model = SKIPS.model()
    return MixedOracle(
        model,
        lowered(model, torch.float16),
        make(model.parameters()),
        m,
        SKIPS.loss_fn,
        delay,
        dtype=torch.float16,
        scale=SCALE.init_scale,
        growth_interval=SCALE.growth_interval,
        **options,
    )


@pytest.mark.parametrize("flush_after", [(), (1, 3, 4)])
@pytest.mark.parametrize(("schedule", "num_stages"), [("2bw", 1), ("2bw", 3), ("1f1b", 3)])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_overflows_are_skipped_as_defined(
    schedule: str, num_stages: int, flush_after: Sequence[int], max_grad_norm: float | None
) -> None:
    batches = with_outliers([1, 5])
    norms: list[float] = []

    def clip(parameters: list[nn.Parameter]) -> None:
        if max_grad_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(parameters, max_grad_norm)))

    oracle = oracle_of(delay=int(schedule == "2bw"), clip=clip)
    want = [oracle.train_step(batch) for batch in batches]
    assert oracle.num_overflows >= 2
    assert max(oracle.scales) > min(oracle.scales)
    with make_pipeline(
        SKIPS, num_stages, 3, batches[0], schedule=schedule, precision="fp16"
    ) as pipe:
        opt = pd2.PipelineOptimizer(
            sgd(pipe.parameters()), loss_scale=SCALE, max_grad_norm=max_grad_norm
        )
        assert float(opt.loss_scale) == SCALE.init_scale
        losses, scales, ours = [], [], []
        for number, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            scales.append(opt.loss_scale)
            if max_grad_norm is not None:
                ours.append(opt.grad_norm)
            if number in flush_after:
                pipe.flush()
        state = copy_of(pipe.state_dict())
        assert [float(scale) for scale in scales] == oracle.scales[1:]
        assert [norm for norm in map(float, ours) if norm < float("inf")] == norms
        assert str([float(loss) for loss in losses]) == str(want)  # nan is nan
        assert {s.weights.engine.newest_version for s in pipe.session.stages} == {len(batches)}
    assert_same_state(state, copy_of(oracle.model.state_dict()))


def test_an_overflow_leaves_moments_and_counts_and_takes_changed_options() -> None:
    batches = with_outliers([2, 3], count=6)
    rates = [0.01, 0.01, 0.003, 0.003, 0.003, 0.006]  # the second is set for one that overflows

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Adam(parameters, lr=0.01, foreach=False)

    oracle = oracle_of(make)
    for rate, batch in zip(rates, batches, strict=True):
        oracle.optimizer.param_groups[0]["lr"] = rate
        oracle.train_step(batch)
    assert oracle.num_overflows == 2
    for kind in (Adam, OwnAdam):
        with make_pipeline(SKIPS, 2, 3, batches[0], precision="fp16") as pipe:
            opt = pd2.PipelineOptimizer(
                kind(pipe.parameters(), lr=0.01, foreach=False), loss_scale=SCALE
            )
            for rate, batch in zip(rates, batches, strict=True):
                pipe.train_step(*batch.args, target=batch.target)
                opt.param_groups[0]["lr"] = rate
                opt.step()
            state = copy_of(pipe.state_dict())
            steps = {float(entry["step"]) for entry in opt.state_dict()["state"].values()}
        assert steps == {4.0}
        assert_same_state(state, copy_of(oracle.model.state_dict()), exact=False)


class OwnAdam(Adam):
    """No fused pass knows it."""


@pytest.mark.parametrize("schedule", ["2bw", "chimera", "interleaved_2bw", "1f1b"])
def test_with_autocast_the_weights_rotate_and_overflows_are_skipped(schedule: str) -> None:
    """Float32 weights: with 2bw the gradients lie where W(t+1) will be."""
    m, d = 4, 2
    batches = SKIPS.batches([8] * 6)
    batches[2].args[0][:] = float("inf")
    options = {"stages_per_rank": 2} if schedule == "interleaved_2bw" else {}
    if schedule == "interleaved_2bw":
        d = 4
    states = []
    for flush in (False, True):
        with make_pipeline(
            SKIPS, d, m, batches[0], schedule=schedule, autocast=torch.float16, **options
        ) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=SCALE)
            scales = []
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
                scales.append(opt.loss_scale)
                if flush:
                    pipe.flush()
            states.append(copy_of(pipe.state_dict()))
            assert [float(scale) for scale in scales] == [1024, 1024, 512, 512, 512, 1024]
    assert_same_state(*states)
    assert all(bool(tensor.isfinite().all()) for tensor in states[0].values())


def test_losses_added_inside_are_scaled_too() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                x = pd2.add_loss(x, x.float().square().mean())
            return x

    batches = SKIPS.batches([6] * 5)
    states = []
    for scale in (1.0, 4096.0):  # powers of two change no bit of float32 gradients
        torch.manual_seed(1)
        with make_pipeline(SKIPS, 3, 3, batches[0], model=Adds(), split="auto") as pipe:
            opt = pd2.PipelineOptimizer(
                sgd(pipe.parameters()), loss_scale=pd2.LossScale(init_scale=scale)
            )
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            states.append(copy_of(pipe.state_dict()))
    assert_same_state(*states)


def test_the_scale_is_saved_and_loaded() -> None:
    batches = with_outliers([1], count=8)

    def run(pipe: Any, opt: Any, part: Sequence[Batch]) -> list[float]:
        scales = []
        for batch in part:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            scales.append(opt.loss_scale)
        return [float(scale) for scale in scales]

    def make(pipe: Any) -> pd2.PipelineOptimizer:
        return pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=SCALE)

    options: dict[str, Any] = {"precision": "fp16", "schedule": "1f1b"}
    with make_pipeline(SKIPS, 2, 3, batches[0], **options) as pipe:
        want = run(pipe, make(pipe), batches)
    with make_pipeline(SKIPS, 2, 3, batches[0], **options) as pipe:
        opt = make(pipe)
        run(pipe, opt, batches[:4])
        weights, kept = copy_of(pipe.state_dict()), copy.deepcopy(opt.state_dict())
    assert kept["loss_scale"] == {"scale": 512.0, "_growth_tracker": 2}
    with make_pipeline(SKIPS, 2, 3, batches[0], **options) as pipe:
        opt = make(pipe)
        pipe.load_state_dict(weights)
        opt.load_state_dict(kept)
        assert float(opt.loss_scale) == 512.0
        assert run(pipe, opt, batches[4:]) == want[4:]


def test_a_scale_that_needs_another_train_step_is_not_waited_for() -> None:
    (batch,) = SKIPS.batches([6])
    with make_pipeline(SKIPS, 2, 3, batch, autocast=torch.bfloat16) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=SCALE)
        for step in range(2):
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            with pytest.raises(RuntimeError, match=f"NewestScale of train_step {step}: .* flush"):
                float(opt.loss_scale)
        pipe.flush()
        assert float(opt.loss_scale) > 0


def test_a_gradient_is_divided_by_what_its_loss_was_multiplied_by() -> None:
    """Whatever optimizer, scale or weights come between the two."""
    (batch,) = SKIPS.batches([6])
    states = []
    for change in (False, True):
        with make_pipeline(SKIPS, 3, 3, batch, autocast=torch.bfloat16) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=SCALE)
            kept = opt.state_dict()
            pipe.train_step(*batch.args, target=batch.target)
            if change:
                kept["loss_scale"]["scale"] = 2.0
                opt.load_state_dict(kept)
                pipe.load_state_dict(pipe.state_dict())
                opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            opt.step()
            states.append(copy_of(pipe.state_dict()))
    assert_same_state(*states)


def test_bad_scales_are_named() -> None:
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"init_scale": 0}, ValueError, "init_scale: 0, it must be > 0 and finite"),
        ({"init_scale": "1"}, TypeError, "init_scale: '1' given"),
        ({"growth_factor": 1.0}, ValueError, r"growth_factor: 1\.0, it must be > 1"),
        ({"backoff_factor": 1.0}, ValueError, r"backoff_factor: 1\.0, it must be > 0 and < 1\.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval: 0, it must be at least 1"),
        ({"growth_interval": 1.5}, TypeError, r"growth_interval: 1\.5 given, it must be an int"),
    ]
    for options, kind, message in bad:
        with pytest.raises(kind, match=message):
            pd2.LossScale(**options)
    batch = SKIPS.batches([6])[0]
    with make_pipeline(SKIPS, 3, 3, batch) as pipe:
        scale: Any = 1024.0
        with pytest.raises(TypeError, match=r"loss_scale: 1024\.0 given, it must be a LossScale"):
            pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=scale)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pytest.raises(ValueError, match="loss_scale: None was given"):
            _ = opt.loss_scale
    with (
        make_pipeline(SKIPS, 3, 1, batch, schedule="pipedream") as pipe,
        pytest.raises(ValueError, match=r"loss_scale: .*, schedule: 'pipedream'.*\[2, 1, 0\]"),
    ):
        pd2.PipelineOptimizer(sgd(pipe.parameters()), loss_scale=SCALE)


def test_a_learning_rate_that_was_set_for_a_skipped_update_is_saved(tmp_path: Path) -> None:
    """An optimizer's own step takes it over with the next update, which the loaded run makes."""
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    overflowing = x.clone()
    overflowing[0, 0] = torch.inf
    states = []
    for is_saved in (False, True):
        torch.manual_seed(1)
        model = [nn.Linear(4, 4), nn.Linear(4, 4)]
        with pd2.PipelineModule(model, mse_loss, num_microbatches=2, example_args=(x,)) as pipe:
            adamax = torch.optim.Adamax(pipe.parameters(), lr=0.1)
            opt = pd2.PipelineOptimizer(adamax, loss_scale=pd2.LossScale(256.0))
            for given in (x, overflowing, x, x):
                pipe.train_step(given, target=x)
                if given is overflowing:
                    opt.param_groups[0]["lr"] = 0.01
                opt.step()
                if given is overflowing and is_saved:
                    pd2.save(tmp_path, pipe, opt).wait()
                    pd2.load(tmp_path, pipe, opt)
            assert opt.param_groups[0]["lr"] == 0.01
            states.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
