"""Metrics are those of the whole batch under the weights that the batch was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS

METRICS = {
    "error": lambda output, target: (output - target).abs().mean(),
    "share": lambda output, target: float((output > target).double().mean()),
    "positive": lambda output, target: (output > 0).double().mean().float(),
}


def trained(
    batches: Sequence[Batch], num_stages: int, m: int, **options: Any
) -> list[tuple[float, dict[str, float]]]:
    task = TASKS["skips"]
    with make_pipeline(task, num_stages, m, batches[0], **options) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
    return [(loss.item(), loss.metrics) for loss in losses]


def want(batches: Sequence[Batch], delay: int) -> list[dict[str, float]]:
    """Of each whole batch, on the delayed weights of plain training on whole batches."""
    model = TASKS["skips"].model().double()
    optimizer = sgd(model.parameters())
    versions = [[p.detach().clone() for p in model.parameters()]]
    metrics = []
    for batch in batches:
        x, target = batch.args[0].double(), batch.target.double()
        _show(model, versions[max(len(versions) - 1 - delay, 0)])
        optimizer.zero_grad()
        output = model(x)
        metrics.append({name: float(fn(output.detach(), target)) for name, fn in METRICS.items()})
        torch.nn.functional.mse_loss(output, target).backward()
        _show(model, versions[-1])
        optimizer.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return metrics


def _show(model: torch.nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)


@settings(max_examples=10, deadline=None)
@given(
    num_stages=st.sampled_from([1, 2, 4]),
    extra=st.integers(0, 2),
    more=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    recompute=st.booleans(),
    schedule=st.sampled_from(["2bw", "2bw_split", "1f1b"]),
)
def test_metrics_are_means_over_the_rows_of_the_batch(
    num_stages: int, extra: int, more: list[int], recompute: bool, schedule: str
) -> None:
    m = num_stages + extra
    batches = TASKS["skips"].batches([m + number for number in more])
    got = trained(batches, num_stages, m, metrics=METRICS, recompute=recompute, schedule=schedule)
    for (_, ours), theirs in zip(got, want(batches, int("2bw" in schedule)), strict=True):
        assert list(ours) == list(METRICS)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_metrics_of_two_pipelines_are_of_both_halves() -> None:
    batches = TASKS["skips"].batches([8, 9, 11])
    got = trained(batches, 2, 4, metrics=METRICS, schedule="chimera")
    for (_, ours), theirs in zip(got, want(batches, 0), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_metrics_change_neither_the_losses_nor_their_bits() -> None:
    batches = TASKS["skips"].batches([8, 9, 7])
    plain = trained(batches, 2, 3)
    assert [metrics for _, metrics in plain] == [{}] * 3
    measured = trained(batches, 2, 3, metrics=METRICS)
    assert [loss for loss, _ in measured] == [loss for loss, _ in plain]


def test_metrics_are_means_where_losses_are_sums() -> None:
    batches = TASKS["skips"].batches([8, 9])
    got = trained(batches[:1], 2, 3, metrics=METRICS, loss_reduction="sum")
    assert got[0][1] == pytest.approx(want(batches[:1], 1)[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["accuracy"], r"metrics: list given"),
        ({"accuracy": 3}, r"metrics\['accuracy'\]: 3 given, it must be callable"),
        ({3: print}, r"metrics: name: 3 given"),
    ],
)
def test_what_are_no_metrics_is_refused(metrics: Any, message: str) -> None:
    (batch,) = TASKS["mlp"].batches([4])
    with pytest.raises(TypeError, match=message):
        make_pipeline(TASKS["mlp"], 2, 2, batch, metrics=metrics)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda output, target: output, r"metrics\['wrong'\] returned shape \[2, 8\]"),
        (lambda output, target: "good", r"metrics\['wrong'\] returned str"),
    ],
)
def test_a_metric_that_is_no_number_is_named(metric: Any, message: str) -> None:
    batches = TASKS["mlp"].batches([4, 4])
    with (
        pytest.raises(RuntimeError, match=message),
        make_pipeline(TASKS["mlp"], 2, 2, batches[0], metrics={"wrong": metric}) as pipe,
    ):
        loss = pipe.train_step(*batches[0].args, target=batches[0].target)
        assert loss.metrics
