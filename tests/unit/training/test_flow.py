"""Lengths, structures, None and several outputs flow through the stages as through the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs.trajectory import check_task, make_pipeline
from tests.samples.flow_models import CARRYING, any_length, nested
from tests.samples.models import WIDTH

few = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_batch_may_have_a_length_of_its_own(num_stages: int, recompute: bool) -> None:
    m = num_stages + 1
    task = any_length([5, 9, 1, 3, 5, 9])
    check_task(task, num_stages, m, rows=[2 * m] * 6, recompute=recompute)


@few
@given(
    num_stages=st.sampled_from([1, 2, 4]),
    extra=st.integers(0, 2),
    batches=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=3, max_size=5),
    schedule=st.sampled_from(["2bw", "2bw_split", "1f1b"]),
)
def test_rows_and_lengths_change_together(
    num_stages: int, extra: int, batches: list[tuple[int, int]], schedule: str
) -> None:
    m = num_stages + extra
    rows = [m + more for more, _ in batches]
    task = any_length([length for _, length in batches])
    check_task(task, num_stages, m, rows, schedule=schedule)


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_arguments_may_be_none_and_outputs_nested(
    gated: bool, num_stages: int, schedule: str
) -> None:
    task = nested(gated=gated, power=3, options={"deep": True, "name": "x"})
    m = num_stages + 1
    check_task(task, num_stages, m, rows=[2 * m, 2 * m + 1, m, 2 * m], schedule=schedule)


def test_another_constant_than_the_examples_is_refused() -> None:
    task = nested(gated=False, power=3)
    (batch,) = task.batches([4])
    with make_pipeline(task, 2, 2, batch) as pipe:
        with pytest.raises(ValueError, match=r"argument power: 2 given, 3 in the example"):
            pipe.train_step(*batch.args, power=2, target=batch.target)
        with pytest.raises(TypeError, match=r"argument x: NoneType given, a tensor"):
            pipe.train_step(None, None, power=3, target=batch.target)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_loss_is_carried_from_stage_to_stage_as_a_number(
    num_stages: int, schedule: str, recompute: bool
) -> None:
    m = num_stages + 1
    rows = [2 * m, 3 * m + 1, m, 2 * m]
    check_task(CARRYING, num_stages, m, rows, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_evaluation_averages_a_carried_number_over_the_rows(rows: int) -> None:
    (batch,) = CARRYING.batches([rows])
    with make_pipeline(CARRYING, 2, 3, batch) as pipe, torch.no_grad():
        output: Any = pipe(*batch.args)
        parts = batch.args[0].tensor_split(min(rows, 3))
        model = CARRYING.model()
        want = sum(model(part)[1] * len(part) for part in parts) / rows
    assert output[0].shape == (rows, WIDTH)
    torch.testing.assert_close(output[1], want)
