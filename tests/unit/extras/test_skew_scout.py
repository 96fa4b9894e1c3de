"""How SkewScout moves between intervals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipedream2bw as pd2


def walk(scout: pd2.SkewScout, losses: Any, start: int) -> list[int]:
    """The intervals that it chooses, one after the other."""
    interval, known, walked = start, {}, [start]
    for loss in losses:
        interval, known = scout.choose(interval, loss(interval), known)
        walked.append(interval)
    return walked


def test_it_finds_the_longest_interval_whose_loss_is_taken_for_noise() -> None:
    scout = pd2.SkewScout([1, 5, 20, 80, 320], threshold=0.05, memory=100)

    def loss(interval: int) -> float:
        return 0.04 if interval <= 20 else 0.3

    walked = walk(scout, [loss] * 8, 1)
    assert walked == [1, 5, 20, 80, 20, 20, 20, 20, 20]
    assert walk(scout, [loss] * 5, 320) == [320, 80, 20, 20, 20, 20]


def test_it_talks_more_when_the_loss_grows_and_less_when_it_is_gone() -> None:
    scout = pd2.SkewScout([2, 4, 8], threshold=0.1)
    small, large = (lambda _: 0.0), (lambda _: 0.5)
    assert walk(scout, [small, small, large, large], 2) == [2, 4, 8, 4, 2]
    assert walk(scout, [large] * 3, 2) == [2, 2, 2, 2]
    assert walk(scout, [small] * 3, 8) == [8, 8, 8, 8]


def test_what_it_knows_is_forgotten_after_some_measurements() -> None:
    scout = pd2.SkewScout([1, 10], threshold=0.1, memory=3)

    def loss(interval: int) -> float:
        return 0.5 if interval == 10 else 0.0

    # 10 costs more, which it remembers for 3 measurements: then it tries again.
    assert walk(scout, [loss] * 9, 1) == [1, 10, 1, 1, 1, 10, 1, 1, 1, 10]


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(-1, 1), max_size=30),
    st.integers(1, 5),
)
def test_it_stays_in_its_intervals_and_moves_a_step_at_a_time(
    intervals: list[int], losses: list[float], memory: int
) -> None:
    scout = pd2.SkewScout(intervals, memory=memory)
    interval, known = intervals[0], {}  # type: int, Costs
    for loss in losses:
        chosen, known = scout.choose(interval, loss, known)
        step = intervals.index(chosen) - intervals.index(interval)
        assert step in ((-1, 0) if loss > scout.threshold else (0, 1))
        assert known[interval][1] == 0
        assert all(age < memory for _, age in known.values())
        interval = chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intervals": []}, "intervals"),
        ({"intervals": [4, 2]}, "intervals"),
        ({"intervals": [2, 2]}, "intervals"),
        ({"intervals": [0, 2]}, "intervals: 0"),
        ({"intervals": [1], "threshold": -1.0}, "threshold: -1"),
        ({"intervals": [1], "loss_weight": 0.0}, "loss_weight: 0"),
        ({"intervals": [1], "memory": 0}, "memory: 0"),
    ],
)
def test_wrong_values_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pd2.SkewScout(**options)


def test_intervals_are_a_list() -> None:
    with pytest.raises(TypeError, match="SkewScout: intervals: 5 given, it must be a list of ints"):
        pd2.SkewScout(5)  # type: ignore[arg-type]
