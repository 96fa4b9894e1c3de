"""A few of the random failures that ``python -m tests.fail_anywhere`` lets happen, each time."""

from __future__ import annotations

import pytest

from tests.fail_anywhere import outcomes_of
from tests.runs.failing import draw


@pytest.mark.parametrize(("world", "count"), [(1, 5), (2, 4)])
def test_a_failure_at_a_random_action_costs_its_batch_and_nothing_else(
    world: int, count: int
) -> None:
    drawn = (draw(number, seed=0) for number in range(100))
    cases = [case for case in drawn if case.world == world][:count]
    outcomes = outcomes_of(cases)
    assert [outcome.wrong for outcome in outcomes] == [""] * count
    assert sum(any(seen.raised for seen in each.by_rank) for each in outcomes) > count // 2
