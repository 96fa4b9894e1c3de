"""Errors with data: what is wrong and where, also after pickling and copying."""

from __future__ import annotations

import copy
import pickle

import pytest

import pipedream2bw as pd2
from pipedream2bw.errors import Cell, Deadlock, DoesNotFit, ScheduleError
from tests.samples.stubborn_schedule import STUBBORN

GPIPE = str(pd2.make_schedule("gpipe", 2, 2))


def refusal(text: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        pd2.load_schedule(text)
    assert isinstance(caught.value, ValueError)
    return caught.value


@pytest.mark.parametrize(
    ("old", "new", "rule", "cell"),
    [
        ("versions: 1,1", "versions: 1", "sizes", None),
        ("1F0,1F1", "0F0,1F1", "placement", Cell(1, "prologue", 0)),
        ("0F0,0F1", "0F0,0F2", "numbering", Cell(0, "prologue", 1)),
        ("0F0,0F1", "0F0,0F0", "exactly once", Cell(0, "prologue", 1)),
        ("0F0,0F1,0B0", "0F0,0B0", "exactly once", Cell(0, "prologue", None)),
        ("1F0,1F1,1B0", "1B0,1F0,1F1", "after forward", Cell(1, "prologue", 0)),
        ("0F0,0F1", "0F1,0F0", "microbatch order", Cell(0, "prologue", 0)),
        ("0B1,0U1", "0U1,0B1", "update order", Cell(0, "prologue", 3)),
        ("delay: 0", "delay: 1", "weight versions", None),
    ],
)
def test_an_illegal_schedule_tells_its_rule_and_its_cell(
    old: str, new: str, rule: str, cell: Cell | None
) -> None:
    assert old in GPIPE
    error = refusal(GPIPE.replace(old, new))
    assert (error.rule, error.cell) == (rule, cell)
    assert not isinstance(error, Deadlock)
    # The grid is there where a cell is, and marks it.
    assert (">" in str(error)) == (cell is not None)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    first = "0F0,0B0,0F1,0B1,0U1"
    second = "1F0,1F1,1B0,1B1,1U1"
    text = GPIPE.replace("0F0,0F1,0B0,0B1,0U1", first)
    assert second in text
    error = refusal(text)
    assert isinstance(error, Deadlock)
    assert (error.rule, error.cell) == ("deadlock", Cell(0, "prologue", 1))
    assert "rank 0 waits in 0B0" in str(error)


def test_a_deadlock_of_joint_updates_is_one() -> None:
    schedule = pd2.load_schedule(STUBBORN)
    with pytest.raises(Deadlock) as caught:
        schedule.check_global_updates()
    assert caught.value.rule == "deadlock"
    assert caught.value.cell is not None


ERRORS = [
    ScheduleError("broken", rule="numbering", cell=(1, "steady", 2)),
    ScheduleError("broken", rule="sizes", cell=None),
    Deadlock("stuck", rule="deadlock", cell=(0, "epilogue", None)),
    DoesNotFit("too large", limit=1.5e9),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}: {error}")
def test_errors_keep_their_data_when_pickled_and_copied(error: Exception) -> None:
    for again in (
        *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, 6)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_a_note_is_pickled_too() -> None:
    error = DoesNotFit("too large", limit=1.0)
    error.__notes__ = ["seen twice"]  # as add_note(), which Python 3.10 has not
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen twice"]
