"""Plans for 16-bit weights come from profiles of such weights, and lay out the float32 model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.exhaustive import exhaustive

X, Y = torch.arange(128.0).reshape(8, 16).sin(), torch.arange(128.0).reshape(8, 16).cos()


def model(*, has_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if has_norm else nn.Tanh()
    return nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.float(), target.float())


def profile(of: nn.Module, dtype: torch.dtype) -> pd2.Profile:
    return pd2.profile(
        of.to(dtype),
        loss,
        example_args=(X.to(dtype),),
        target=Y,
        microbatch_rows=(2,),
        dry=pd2.KNOWN_DEVICES["v100"],
    )


def plan(of: pd2.Profile, **changes: Any) -> pd2.Plan:
    sizes = {"devices": 2, "memory": "1GiB", "batch": 8, "width": 1, "num_stages": 2}
    return pd2.plan(of, **{**sizes, "schedules": "2bw", "recompute": "none", **changes})


@pytest.mark.parametrize("split_master", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_the_float32_model_trains_by_the_plan_of_its_16_bit_weights(
    has_norm: bool, split_master: bool
) -> None:
    precision = {"precision": "bf16", "split_master": split_master}
    made = plan(profile(model(has_norm=has_norm), torch.bfloat16), **precision)
    pipe = pd2.PipelineModule(
        model(has_norm=has_norm), loss, plan=made, example_args=(X[:2],), **precision
    )
    with pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-2))
        losses = []
        for _ in range(8):
            losses.append(pipe.train_step(X, target=Y))
            opt.step()
        assert float(losses[-1]) < float(losses[0])
        pipe.flush()
        if has_norm:  # whose float32 weights the plan does not know
            return
        for stage, report in zip(made.stages, pipe.memory_report().values(), strict=True):
            held = report.weights + report.masters + report.optimizer_state
            assert held == 2 * stage.weight_bytes + stage.state_bytes
            assert report.gradients == stage.gradient_bytes


def test_a_profile_in_another_dtype_is_refused() -> None:
    in_float32 = profile(model(), torch.float32)
    with pytest.raises(
        ValueError,
        match=r"precision: 'bf16', trained parameters of the profiled model: torch\.float32: .*"
        r"model\.bfloat16\(\)",
    ):
        plan(in_float32, precision="bf16")
    with pytest.raises(ValueError, match=r"precision: 'fp16', .* torch\.bfloat16: .*half\(\)"):
        plan(profile(model(), torch.bfloat16), precision="fp16")
    assert plan(in_float32, precision="fp32") == plan(in_float32)


def test_a_plan_of_16_bit_weights_needs_the_precision() -> None:
    made = plan(profile(model(), torch.bfloat16), precision="bf16")
    for precision in (None, "fp16"):
        with pytest.raises(ValueError, match=r"plan of another model: .* dtypes"):
            pd2.PipelineModule(model(), loss, plan=made, example_args=(X[:2],), precision=precision)
    wider = nn.Sequential(*list(model())[:4], nn.Linear(16, 17))
    with pytest.raises(ValueError, match=r"plan of another model: .* shapes"):
        pd2.PipelineModule(wider, loss, plan=made, example_args=(X[:2],), precision="bf16")


def test_an_update_takes_the_time_of_float32_masters() -> None:
    """The elements are stepped in float32 whatever the weights' dtype."""
    of_16, of_32 = (profile(model(), dtype) for dtype in (torch.bfloat16, torch.float32))
    for changes in ({}, {"optimizer": "sgd"}):
        updates = [stage.update for stage in plan(of_32, **changes).stages]
        assert [stage.update for stage in plan(of_16, precision="bf16", **changes).stages] == (
            pytest.approx(updates)
        )


def test_a_measured_profile_must_have_the_optimizers_time() -> None:
    made = profile(model(), torch.float32)
    lacking = dataclasses.replace(made, seconds_per_update_byte={"sgd": 1e-12})
    assert plan(lacking).stages[0].update == 0  # nothing was measured at all
    measured = dataclasses.replace(
        lacking, device=dataclasses.replace(lacking.device, measured=True)
    )
    assert plan(measured, optimizer="sgd").stages[0].update > 0
    with pytest.raises(
        ValueError, match="optimizer: 'adamw', the profile's seconds_per_update_byte: sgd: "
    ):
        plan(measured)


def test_an_optimizer_on_the_host_takes_no_memory_of_devices() -> None:
    made = profile(model(), torch.bfloat16)
    times = {"adamw": 1e-10, "adamw on host": 7e-10}
    timed = dataclasses.replace(made, seconds_per_update_byte=times)
    there = plan(timed, precision="bf16").stages
    here = plan(timed, precision="bf16", optimizer_device="cpu").stages
    assert [stage.state_bytes for stage in here] == [0] * len(there)
    assert [stage.peak_bytes for stage in here] == [
        pytest.approx(stage.peak_bytes - stage.state_bytes) for stage in there
    ]
    assert [stage.update for stage in here] == [pytest.approx(7 * stage.update) for stage in there]
    measured = dataclasses.replace(
        made,
        seconds_per_update_byte={"adamw": 1e-10},
        device=dataclasses.replace(made.device, measured=True),
    )
    with pytest.raises(ValueError, match="optimizer: 'adamw on host', the profile's seconds_per"):
        plan(measured, precision="bf16", optimizer_device="cpu")
    with pytest.raises(ValueError, match="optimizer_device: 'cuda', known: 'cpu'"):
        plan(made, optimizer_device="cuda")


def test_an_update_on_the_host_takes_no_time_of_the_device() -> None:
    made = profile(model(), torch.float32)
    weights = [stage.weight_bytes for stage in plan(made).stages]

    def seconds(update: float, **options: Any) -> float:
        """Of a batch with an update that takes so long on the larger stage."""
        each = update / max(weights)
        timed = dataclasses.replace(
            made, seconds_per_update_byte={"adamw": each, "adamw on host": each}
        )
        return plan(timed, **options).seconds_per_batch

    alone = seconds(0.0)
    assert seconds(0.5 * alone) > 1.2 * alone
    assert seconds(0.5 * alone, optimizer_device="cpu") == pytest.approx(alone)
    # Four microbatches: the first stage begins one of batch t + 2, which waits for the update of
    # batch t, before batch t + 1's last backward.
    assert seconds(3 * alone, optimizer_device="cpu") == pytest.approx((3 + 1 / 4) * alone)


def test_a_dry_profile_knows_the_optimizer_on_the_host_from_the_figures() -> None:
    def dry(**changes: Any) -> pd2.Profile:
        figures = dataclasses.replace(pd2.KNOWN_DEVICES["v100"], **changes)
        return pd2.profile(
            model(), loss, example_args=(X,), target=Y, microbatch_rows=(2,), dry=figures
        )

    def update(of: pd2.Profile) -> float:
        (stage,) = plan(of, optimizer_device="cpu", num_stages=1).stages
        return stage.update / stage.weight_bytes

    # Adam reads and writes 7 bytes for each of the weights', at 0.8 of the peak.
    assert update(dry()) == pytest.approx(7 / (0.8 * 19.2e9))
    assert update(dry(copy_bytes_per_second=1e9)) == pytest.approx(1 / (0.8 * 1e9))
    for missing in ("host_bytes_per_second", "copy_bytes_per_second"):
        with pytest.raises(ValueError, match=r"'adamw on host'.* host_bytes_per_second and copy_b"):
            update(dry(**{missing: None}))


@pytest.mark.parametrize("has_norm", [True, *exhaustive(False)])
def test_auto_measures_the_weights_that_stages_have(has_norm: bool, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole = model(has_norm=has_norm)
    options: dict[str, Any] = {
        "num_stages": "auto",
        "num_microbatches": 4,
        "devices": ["cpu"] * 2,
        "example_args": (X,),
        "example_target": Y,
        "profile": path,
    }
    for _ in range(2):  # the second time from the file
        with pd2.PipelineModule(whole, loss, precision="bf16", **options) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            losses = []
            for _ in range(4):
                losses.append(pipe.train_step(X, target=Y))
                opt.step()
            assert float(losses[-1]) < float(losses[0])
    profiled = pd2.Profile.load(path)
    assert "torch.bfloat16" in profiled.trained_dtypes
    assert ("torch.float32" in profiled.trained_dtypes) == has_norm
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"parameter 0 is .*float32 in the model, .*bfloat16"):
        pd2.PipelineModule(whole, loss, **options)
