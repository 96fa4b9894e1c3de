"""Losses divided by the number of tokens that count: to the bits of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from tests.runs.token_losses import (
    PADDING,
    TASK,
    by_definition,
    by_pipeline,
    count,
    padded,
    sum_of_token_losses,
)
from tests.runs.trajectory import assert_same, make_pipeline, sgd

SCHEDULES = {"2bw": (1, 1), "1f1b": (0, 1), "chimera": (0, 2), "2bw_split": (1, 1)}
"""Delay and pipelines."""


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padded_text_has_the_mean_over_its_tokens(schedule: str, accumulate: int) -> None:
    delay, num_pipelines = SCHEDULES[schedule]
    batches = padded([8, 9, 6, 8, 7, 4] if num_pipelines == 1 else [8] * 6)
    of_definition = {"delay": delay, "num_pipelines": num_pipelines}
    want = by_definition([batches], 4, accumulate, **of_definition)
    assert_same(by_pipeline(batches, 2, 4, accumulate, schedule=schedule), want)


def test_the_number_may_be_counted_in_the_target() -> None:
    batches = padded([8] * 5)
    want = by_definition([batches], 4, delay=1)
    assert_same(by_pipeline(batches, 3, 4, normalizer=count), want)
    as_tensor = by_pipeline(batches, 3, 4, normalizer=lambda target: (target != PADDING).sum())
    assert_same(as_tensor, want)


@given(st.lists(st.integers(4, 9), min_size=3, max_size=3), st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_it_is_one_sum_over_all_tokens(rows: list[int], seed: int) -> None:
    """However they lie in microbatches and train_steps: stock torch's own mean over tokens."""
    batches = padded(rows, seed)
    got = by_pipeline(batches, 2, 4, accumulate=3, schedule="1f1b")
    model = TASK.model()
    optimizer = sgd(model.parameters())
    tokens = torch.cat([batch.args[0] for batch in batches])
    target = torch.cat([batch.target for batch in batches])
    loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten(), ignore_index=PADDING)
    loss.backward()
    optimizer.step()
    assert sum(got.losses) == pytest.approx(loss.item(), rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got.state[name], value, rtol=1e-5, atol=1e-6)


def test_a_batch_without_a_token_that_counts_changes_nothing_but_its_number() -> None:
    batches = padded([8, 8, 8])[1:2] * 3
    assert count(batches[0].target) == 0
    got = by_pipeline(batches, 2, 4)
    assert got.losses == [0.0] * 3
    for name, value in TASK.model().state_dict().items():
        assert torch.equal(got.state[name], value)


def test_train_steps_under_no_sync_are_given_the_whole_batchs_number() -> None:
    batches = padded([8, 8, 8, 8])[2:]
    want = by_definition([batches], 4, 2, delay=1)
    options: dict[str, Any] = {"loss_reduction": "sum", "normalizer": True}
    with make_pipeline(TASK, 2, 4, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        total = sum(count(batch.target) for batch in batches)
        with pipe.no_sync():
            pipe.train_step(*batches[0].args, target=batches[0].target, normalizer=total)
        pipe.train_step(*batches[1].args, target=batches[1].target, normalizer=total)
        opt.step()
        pipe.flush()
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, want.state[name])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"normalizer": True, "loss_reduction": "mean"}, ValueError, "'mean': what"),
        ({"normalizer": count, "accumulate": 2}, ValueError, "accumulate: 2: a batch"),
        ({"normalizer": 7}, TypeError, "normalizer: 7 given, it must be a bool or a function"),
    ],
)
def test_options_that_do_not_go_together(options: Any, error: type[Exception], text: str) -> None:
    batch = padded([8])[0]
    with pytest.raises(error, match=text):
        make_pipeline(TASK, 2, 4, batch, **{"loss_reduction": "sum", **options})


@pytest.mark.parametrize(
    ("rule", "given", "error", "text"),
    [
        (True, None, ValueError, "normalizer: None given, the pipeline's is True"),
        (False, 3, ValueError, "normalizer: 3 given, the pipeline's is False"),
        (count, 3, ValueError, "normalizer: 3 given, the pipeline's is <function"),
        (True, -1, ValueError, "normalizer: -1, it must be at least 0"),
        (True, 2**63, ValueError, "it must be at most"),
        (True, 1.5, TypeError, "normalizer: 1.5, it must be a whole number"),
        (
            lambda target: "many",
            None,
            TypeError,
            r"normalizer\(target\): 'many', it must be a whole",
        ),
    ],
)
def test_numbers_that_are_none(rule: Any, given: Any, error: type[Exception], text: str) -> None:
    batch, good = padded([8, 8, 8])[0], 40
    options: dict[str, Any] = {"loss_reduction": "sum", "normalizer": rule}
    with make_pipeline(TASK, 2, 4, batch, **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pytest.raises(error, match=text):
            pipe.train_step(*batch.args, target=batch.target, normalizer=given)
        if rule is True:  # and the pipeline goes on
            pipe.train_step(*batch.args, target=batch.target, normalizer=good)
            opt.step()


def test_train_steps_of_a_batch_with_different_numbers() -> None:
    batch = padded([8])[0]
    options: dict[str, Any] = {"loss_reduction": "sum", "normalizer": True, "accumulate": 2}
    with make_pipeline(TASK, 2, 4, batch, **options) as pipe:
        pd2.PipelineOptimizer(sgd(pipe.parameters()))
        pipe.train_step(*batch.args, target=batch.target, normalizer=10)
        with pytest.raises(
            ValueError, match="11 in all replicas, in the batch's first train_step: 10"
        ):
            pipe.train_step(*batch.args, target=batch.target, normalizer=11)


def test_without_a_normalizer_sums_are_added() -> None:
    batch = padded([8])[0]
    with make_pipeline(TASK, 2, 4, batch, loss_reduction="sum") as pipe:
        pd2.PipelineOptimizer(sgd(pipe.parameters()))
        got = float(pipe.train_step(*batch.args, target=batch.target))
    want = sum_of_token_losses(TASK.model()(*batch.args), batch.target).item()
    assert got == pytest.approx(want, rel=1e-5)
