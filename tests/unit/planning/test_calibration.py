"""What runs took teaches a margin for what plans predict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.planner.planning.calibration import Calibration, calibrate
from pipedream2bw.runtime.stage_memory import StageMemory
from tests.samples.plans import plan_for, plan_of, stage_plan, with_peak

MIB = 2.0**20


def plan(*activations: float, **changes: Any) -> pd2.Plan:
    stages = [
        stage_plan((i, i + 1), devices=(i,), activation_bytes=size * MIB)
        for i, size in enumerate(activations)
    ]
    return plan_of(stages, **changes)


def report(stage: Any, *, factor: float, padding: int) -> StageMemory:
    return StageMemory(
        weights=int(stage.num_versions * stage.weight_bytes),
        masters=0,
        gradients=int(stage.gradient_bytes),
        optimizer_state=int(stage.state_bytes),
        kept_gradients=0,
        host_copies=0,
        on_host=0,
        frozen_weights=0,
        buffers=0,
        padding=padding,
        activations=int(factor * stage.most_in_flight * stage.activation_bytes),
        message_buffers=0,
        most_in_flight=stage.most_in_flight,
        most_live_versions=2,
    )


factors = st.floats(0.5, 3.0)
offsets = st.integers(0, 2**30)


@given(factors, offsets, st.lists(st.integers(1, 1000), min_size=2, max_size=5, unique=True))
def test_a_straight_line_is_found_from_reports_and_from_bytes(
    factor: float, offset: int, sizes: list[int]
) -> None:
    made = plan(*sizes)
    reports = {
        i: report(stage, factor=factor, padding=offset) for i, stage in enumerate(made.stages)
    }
    found = calibrate(made, reports)
    assert found.activations == pytest.approx(factor, rel=1e-5)
    assert found.offset == pytest.approx(offset, abs=2 * len(sizes) + 1e-5 * 1000 * MIB)
    totals = {i: each.total for i, each in reports.items()}
    kept = [stage.most_in_flight * stage.activation_bytes for stage in made.stages]
    has_slope = max(kept) - min(kept) > 0.01 * max(kept)  # or bytes alone do not show the factor
    above = 0 if has_slope else abs(1 - factor) * max(kept)
    for learnt, most_above in ((found, 0), (calibrate(made, totals), above)):
        for says, measured in zip(learnt.peak_bytes(made), totals.values(), strict=True):
            assert measured * (1 - 1e-9) <= says <= measured * (1 + 1e-6) + most_above


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0.7, 2.0), offsets), min_size=1, max_size=5)
)
def test_no_device_was_above_what_the_calibration_says(
    devices: list[tuple[int, float, int]],
) -> None:
    made = plan(*(size for size, _, _ in devices))
    reports = {
        i: report(stage, factor=factor, padding=offset)
        for i, (stage, (_, factor, offset)) in enumerate(zip(made.stages, devices, strict=True))
    }
    totals = {i: each.total for i, each in reports.items()}
    for measured in (reports, totals):
        says = calibrate(made, measured).peak_bytes(made)
        for predicted, total in zip(says, totals.values(), strict=True):
            assert predicted >= total * (1 - 1e-9)


def test_the_device_that_kept_most_gives_the_factor() -> None:
    made = plan(100, 100)
    reports = {
        i: report(stage, factor=factor, padding=0)
        for i, (stage, factor) in enumerate(zip(made.stages, (1.25, 1.5), strict=True))
    }
    assert calibrate(made, reports) == Calibration(1.5, 0.0)


def test_a_real_pipelines_report_calibrates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    kept = {"activation_bytes": 8.0, "weight_bytes": 80.0, "gradient_bytes": 80.0}
    made = plan_for(model, ["2"], (x,))
    stages = [
        with_peak(dataclasses.replace(stage, **kept, state_bytes=0.0)) for stage in made.stages
    ]
    peak = max(stage.peak_bytes for stage in stages)
    made = dataclasses.replace(made, stages=tuple(stages), peak_bytes=peak)
    with pd2.PipelineModule(model, mse_loss, plan=made, example_args=(x,)) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(3):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()
        reports = pipe.memory_report()
    learnt = calibrate(made, reports)
    for says, stage in zip(learnt.peak_bytes(made), reports.values(), strict=True):
        assert says >= stage.total


def test_stages_of_one_device_count_together() -> None:
    chunks = plan(*(10, 20, 30, 40), schedule="interleaved", stages_per_rank=2, num_microbatches=2)
    chunks = dataclasses.replace(
        chunks,
        stages=tuple(
            dataclasses.replace(stage, devices=(i % 2,)) for i, stage in enumerate(chunks.stages)
        ),
    )
    reports = {i: report(stage, factor=2.0, padding=100) for i, stage in enumerate(chunks.stages)}
    assert calibrate(chunks, reports) == Calibration(2.0, 200.0)
    # Of rank 1 stage 3 is missing, so rank 0 alone is learnt from.
    del reports[3]
    assert calibrate(chunks, reports) == Calibration(2.0, 200.0)
    del reports[2]
    with pytest.raises(ValueError, match=r"measured: stages \[0, 1\], devices hold \[\[0, 2\]"):
        calibrate(chunks, reports)


def test_the_profile_gets_the_factor(tmp_path: Path) -> None:
    layer = pd2.profile(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        mse_loss,
        example_args=(torch.zeros(1, 4),),
        target=torch.zeros(1, 4),
        microbatch_rows=(1, 2),
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    more = Calibration(1.5, 0.0).applied_to(layer)
    for before, after in zip(layer.microbatches, more.microbatches, strict=True):
        assert sum(before.activation_bytes) > 0
        assert after.activation_bytes == tuple(round(1.5 * k) for k in before.activation_bytes)
        assert after.forward == before.forward
    assert more.fingerprint == layer.fingerprint


def test_wrong_measurements_are_named() -> None:
    made = plan(10, 20)
    with pytest.raises(ValueError, match=r"measured: stage 2, the plan has \[0, 1\]"):
        calibrate(made, {2: 1.0})
    with pytest.raises(ValueError, match=r"measured\[0\]: -1, it must be > 0"):
        calibrate(made, {0: -1})
    with pytest.raises(TypeError, match=r"measured\[0\]: StageMemory given"):
        calibrate(made, {0: report(made.stages[0], factor=1, padding=0), 1: 3.0})
    with pytest.raises(ValueError, match=r"measured: stages \[\]"):
        calibrate(made, {})


def test_it_is_saved_and_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    Calibration(1.25, 4096.0).save(path)
    assert Calibration.load(path) == Calibration(1.25, 4096.0)
    fields = json.loads(path.read_text())
    for name, value, rule in (
        ("activations", 0.0, "must be > 0"),
        ("offset", -1.0, "must be >= 0"),
        ("offset", "much", "must be a number"),
        ("version", 2, "must be 1"),
    ):
        path.write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=rf"calibration\.json: {name}: .*{rule}"):
            Calibration.load(path)
