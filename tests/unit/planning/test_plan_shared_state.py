"""Plans for replicas that share out optimizer state, and for gradients of 16 bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.errors import DoesNotFit
from tests.unit.planning.test_plan_precision import X, Y, loss, model, plan, profile

HALF: dict[str, Any] = {"precision": "bf16"}
NARROW: dict[str, Any] = {**HALF, "gradient_dtype": torch.bfloat16}
SPLIT: dict[str, Any] = {**HALF, "split_master": True}


@pytest.fixture(scope="module")
def of_16_bits() -> pd2.Profile:
    times = {"adamw": 1e-9}
    return dataclasses.replace(profile(model(), torch.bfloat16), seconds_per_update_byte=times)


def replicas(of: pd2.Profile, width: int, **changes: Any) -> pd2.Plan:
    """Of two stages, all devices linked alike."""
    count = 2 * width
    devices = pd2.Cluster.servers(count, devices_per_server=count, inside=1e9, outside=1e9)
    return plan(of, **{"devices": devices, "batch": 8 * width, "width": width, **changes})


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "whole", "shared"),
    [(HALF, 8, 12), (NARROW, 6, 12), (SPLIT, 8, 10), ({**NARROW, **SPLIT}, 6, 10)],
)
def test_a_parameter_takes_what_is_whole_and_a_share_of_the_rest(
    of_16_bits: pd2.Profile, options: dict[str, Any], whole: int, shared: int, width: int
) -> None:
    """Under 2bw: two versions and a gradient on each replica, master and moments on one."""
    for shard_state, each in ((True, whole + shared / width), (False, whole + shared)):
        made = replicas(of_16_bits, width, **options, shard_state=shard_state)
        for stage in made.stages:
            held = 2 * stage.weight_bytes + stage.gradient_bytes + stage.state_bytes
            assert held == each * stage.weight_bytes / 2


@pytest.mark.parametrize("width", [2, 4])
def test_replicas_step_a_share_and_exchange_gradients_one_way_and_weights_the_other(
    of_16_bits: pd2.Profile, width: int
) -> None:
    """Beside 4 + 4 bytes a parameter of sums in float32: 4 + 2, and 2 + 2."""
    whole = replicas(of_16_bits, width, **HALF).stages
    for options, sent in (({**HALF, "shard_state": True}, 6), ({**NARROW, "shard_state": True}, 4)):
        for stage, beside in zip(replicas(of_16_bits, width, **options).stages, whole, strict=True):
            assert stage.update == pytest.approx(beside.update / width)
            assert stage.all_reduce == pytest.approx(beside.all_reduce * sent / 8)
    for stage, beside in zip(replicas(of_16_bits, width, **NARROW).stages, whole, strict=True):
        assert stage.update == beside.update, "masters are stepped in float32"
        assert stage.all_reduce == pytest.approx(beside.all_reduce / 2)


def test_what_fits_only_in_shares_is_planned_with_them(of_16_bits: pd2.Profile) -> None:
    peaks = {
        shard_state: replicas(of_16_bits, 4, **HALF, shard_state=shard_state).peak_bytes
        for shard_state in (False, True)
    }
    memory = sum(peaks.values()) / 2
    assert replicas(of_16_bits, 4, **HALF, shard_state=True, memory=memory).shard_state
    with pytest.raises(DoesNotFit):
        replicas(of_16_bits, 4, **HALF, memory=memory)


def test_a_pipeline_holds_what_the_plan_says(of_16_bits: pd2.Profile) -> None:
    made = plan(of_16_bits, **NARROW)
    assert made.gradient_dtype == "bfloat16"
    with pd2.PipelineModule(model(), loss, plan=made, example_args=(X[:2],), **NARROW) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-2))
        for _ in range(3):
            pipe.train_step(X, target=Y)
            opt.step()
        pipe.flush()
        for stage, report in zip(made.stages, pipe.memory_report().values(), strict=True):
            held = report.weights + report.masters + report.optimizer_state
            assert held == 2 * stage.weight_bytes + stage.state_bytes
            assert report.gradients == stage.gradient_bytes


def test_two_pipelines_share_no_state_and_are_left_out(of_16_bits: pd2.Profile) -> None:
    shares: dict[str, Any] = {**HALF, "shard_state": True, "width": None, "num_stages": None}
    sizes: dict[str, Any] = {**shares, "devices": 4, "batch": 16}
    every = pd2.plan(of_16_bits, memory="1GiB", **{**HALF, "devices": 4, "batch": 16})
    left = pd2.plan(of_16_bits, memory="1GiB", **sizes)
    tried = {each.schedule for each in (left, *left.alternatives)}
    assert "chimera" not in tried
    assert not every.shard_state
    assert left.shard_state
    for schedules in ("chimera", ["2bw", "chimera"]):
        with pytest.raises(ValueError, match="shard_state: True, schedules: chimera, pipelines: 2"):
            plan(of_16_bits, **sizes | {"schedules": schedules})


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"shard_state": 1}, TypeError, "shard_state: 1 given, it must be a bool"),
        (
            {**HALF, "shard_state": True, "optimizer_device": "cpu"},
            ValueError,
            "shard_state: True, optimizer_device: 'cpu'.* it must be None",
        ),
        ({**HALF, "gradient_dtype": "int8"}, TypeError, "gradient_dtype: 'int8' given"),
        (
            {**HALF, "gradient_dtype": torch.half},
            ValueError,
            "gradient_dtype: torch.float16, known",
        ),
        (
            {"gradient_dtype": torch.bfloat16},
            ValueError,
            "gradient_dtype: torch.bfloat16, precision: None: it must be 'bf16'",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    of_16_bits: pd2.Profile, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plan(of_16_bits, **given)


def test_files_have_both(of_16_bits: pd2.Profile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = replicas(of_16_bits, 2, **NARROW, shard_state=True)
    made.save(path)
    assert pd2.Plan.load(path) == made
    assert json.loads(path.read_text())["shard_state"] is True
