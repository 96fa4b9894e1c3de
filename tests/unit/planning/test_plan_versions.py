"""Plans count the weight versions of pipedream, and the steps that error feedback keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.unit.planning.test_plan_precision import X, Y, loss, model, plan, profile

FEEDBACK: dict[str, Any] = {"staleness": pd2.ErrorFeedback()}


def reports_of(
    made: pd2.Plan, *, of_optimizer: dict[str, Any] | None = None, **options: Any
) -> list[tuple[pd2.StagePlan, Any]]:
    """Each stage with what it holds after some batches."""
    rows = made.batch
    pipe = pd2.PipelineModule(model(), loss, plan=made, example_args=(X[:2],), **options)
    with pipe:
        opt = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=1e-2), **(of_optimizer or {})
        )
        for _ in range(6):
            pipe.train_step(X[:rows], target=Y[:rows])
            opt.step()
        pipe.flush()
        reports = list(pipe.memory_report().values())
    return list(zip(made.stages, reports, strict=True))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_stage_under_pipedream_holds_the_versions_that_the_plan_says(num_stages: int) -> None:
    of = profile(model(), torch.float32)
    made = plan(of, devices=3, num_stages=num_stages, batch=2, schedules="pipedream")
    schedule = pd2.make_schedule("pipedream", num_stages, 1)
    assert made.num_microbatches == 1
    assert [stage.num_versions for stage in made.stages] == schedule.num_versions
    for stage, report in reports_of(made):
        assert report.weights == stage.num_versions * stage.weight_bytes
        assert report.gradients == stage.gradient_bytes
        assert report.optimizer_state == stage.state_bytes
        assert report.most_in_flight == stage.most_in_flight
        assert report.activations == stage.most_in_flight * stage.activation_bytes


def test_pipedream_is_chosen_where_its_versions_fit() -> None:
    """A batch of one microbatch: a pipeline that drains has one stage at work at a time."""
    of = profile(model(), torch.float32)
    sizes: dict[str, Any] = {"devices": 3, "num_stages": 3, "batch": 2}
    both = ("1f1b", "pipedream")
    chosen = plan(of, schedules=both, **sizes)
    assert chosen.schedule == "pipedream"
    drained = plan(of, schedules="1f1b", **sizes)
    assert drained.peak_bytes < chosen.peak_bytes
    least = (drained.peak_bytes + chosen.peak_bytes) / 2
    assert plan(of, schedules=both, memory=least, **sizes).schedule == "1f1b"


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 4),
        ({"precision": "bf16"}, 0),
        ({"precision": "bf16", "split_master": True}, 4),
        ({"optimizer_device": "cpu"}, 0),
    ],
)
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.filterwarnings("ignore:staleness. .*without a delay this does nothing")
def test_a_plan_counts_the_steps_that_error_feedback_keeps(
    schedule: str, options: dict[str, Any], each: int
) -> None:
    """Bytes for each parameter; none where no forward is late."""
    of = profile(model(), torch.bfloat16 if "precision" in options else torch.float32)
    given = {"schedules": schedule, **options}
    without, made = plan(of, **given), plan(of, **given, **FEEDBACK)
    for stage, other in zip(made.stages, without.stages, strict=True):
        numel = stage.weight_bytes / (2 if "precision" in options else 4)
        kept = each * numel if schedule == "2bw" else 0
        assert stage.state_bytes == other.state_bytes + kept
        assert stage.peak_bytes == other.peak_bytes + kept
    for stage, report in reports_of(made, of_optimizer=FEEDBACK, **options):
        on_device = 0 if "optimizer_device" in options else report.masters + report.optimizer_state
        assert report.weights + on_device == (
            stage.num_versions * stage.weight_bytes + stage.state_bytes
        )


def test_replicas_share_out_the_kept_steps() -> None:
    of = profile(model(), torch.float32)
    sizes: dict[str, Any] = {"devices": 4, "width": 2, "batch": 16, "shard_state": True}
    for stage in plan(of, **sizes, **FEEDBACK).stages:
        assert stage.state_bytes == 3 * stage.weight_bytes / 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**FEEDBACK, "schedules": ["2bw", "pipedream"]}, "staleness: .*, schedules: 2bw, pipe.*1"),
        ({"staleness": pd2.NesterovCorrection(), "schedules": "2bw_fresh"}, "2bw_fresh: a Nest"),
        ({"staleness": pd2.NesterovCorrection(), "shard_state": True}, "shard_state: True, stale"),
        ({"schedules": "pipedream"}, "batch: 8, largest_batch: 8: no width, microbatch size"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(profile(model(), torch.float32), **given)


def test_auto_plans_pipedream() -> None:
    options: dict[str, Any] = {
        "num_stages": "auto",
        "schedule": "pipedream",
        "devices": ["cpu"] * 3,
        "example_args": (X[:2],),
        "example_target": Y[:2],
        "profile": profile(model(), torch.float32),
    }
    with pd2.PipelineModule(model(), loss, **options) as pipe:
        assert (pipe.schedule, pipe.num_stages, pipe.num_microbatches) == ("pipedream", 3, 1)
    with pytest.raises(ValueError, match="num_microbatches: 2: pipedream updates after every"):
        pd2.PipelineModule(model(), loss, num_microbatches=2, **options)
