"""What is given for the delay does nothing under a schedule without one, and a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.optim import SGD

import pipedream2bw as pd2
from tests.runs.trajectory import assert_same, by_pipeline, make_pipeline
from tests.samples.models import TASKS

REMEDIES = [
    pd2.ErrorFeedback(),
    pd2.NesterovCorrection(momentum=0.9),
    pd2.LearningRateDiscount(3),
    [pd2.LearningRateDiscount(3), pd2.ErrorFeedback()],
]


def said(pipeline: dict[str, Any], optimizer: dict[str, Any], schedule: str) -> list[str]:
    task = TASKS["mlp"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_pipeline(task, 2, 2, task.batches([2])[0], schedule=schedule, **pipeline) as pipe:
            pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), **optimizer)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "chimera", "zero_bubble"])
@pytest.mark.parametrize("remedy", REMEDIES, ids=str)
def test_a_remedy_without_a_delay_does_nothing(schedule: str, remedy: Any) -> None:
    task = TASKS["mlp"]
    batches = task.batches([4] * 4)

    def sgd(parameters: Any) -> Any:
        return SGD(parameters, lr=0.1)

    plain = by_pipeline(task, batches, 2, 2, sgd, schedule=schedule)
    with pytest.warns(match=rf'^staleness: .*, schedule: "{schedule}": without a delay'):
        remedied = by_pipeline(task, batches, 2, 2, sgd, schedule=schedule, staleness=remedy)
    assert_same(remedied, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_each_option_for_the_delay_is_told_once(schedule: str) -> None:
    slots: Any
    for slots in (1, "auto"):
        (text,) = said({"update_slots": slots, "warmup_batches": 2}, {}, schedule)
        assert text.startswith(f'update_slots: {slots}, warmup_batches: 2, schedule: "{schedule}"')
    (text,) = said({}, {"staleness": pd2.ErrorFeedback()}, schedule)
    assert "staleness: ErrorFeedback(" in text
    assert said({}, {}, schedule) == []


def test_under_a_delay_nothing_is_said() -> None:
    options = {"update_slots": 1, "warmup_batches": 2}
    assert said(options, {"staleness": pd2.ErrorFeedback()}, "2bw") == []


def test_slots_still_need_one_delay_on_all_stages() -> None:
    task = TASKS["mlp"]
    with pytest.raises(ValueError, match=r"update_slots: 1, schedule: 'pipedream' .*batch late"):
        make_pipeline(task, 3, 1, task.batches([3])[0], schedule="pipedream", update_slots=1)
