"""Moves between markets are the cheapest of all sequences, by enumeration."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream2bw.planner.planning.moves import Copy, Market, Moves, cheapest_moves

HOUR = 3600.0


def price_of(
    sequence: tuple[int | None, ...],
    markets: list[Market],
    copies: dict[tuple[str, str], Copy],
    start: str | None,
    rows: float,
) -> float:
    """Of a market for each hour, or None to wait; infinite if it cannot be or is not enough."""
    place, price, left = start, 0.0, rows
    for hour, choice in enumerate(sequence):
        if choice is None:
            continue
        market, lost = markets[choice], 0.0
        if place not in (None, market.name):
            if (place, market.name) not in copies:
                return math.inf
            copy = copies[place, market.name]
            price, lost = price + copy.price, copy.hours
        place = market.name
        needed = lost + left / (HOUR * market.rows_per_second)
        if needed <= 1 + 1e-12:
            return price + needed * market.prices[hour]
        price += market.prices[hour]
        left -= (1 - lost) * HOUR * market.rows_per_second
    return math.inf


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    count, hours = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    whole = st.integers(0, 8).map(float)
    markets = [
        Market(
            name="abc"[i],
            rows_per_second=draw(st.sampled_from([0.5, 1.0, 1.5])),
            prices=draw(st.lists(whole, min_size=hours, max_size=hours)),
        )
        for i in range(count)
    ]
    pairs = itertools.permutations([market.name for market in markets], 2)
    copies = {
        pair: Copy(hours=draw(st.sampled_from([0.0, 0.25, 0.9])), price=draw(whole) / 4)
        for pair in pairs
        if draw(st.integers(0, 4))
    }
    return {
        "markets": markets,
        "copies": copies,
        "start": draw(st.sampled_from([None, *(market.name for market in markets)])),
        "rows": HOUR * draw(st.sampled_from([0.4, 1.0, 2.2, 3.7])),
        "deadline": hours,
    }


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_moves_are_the_cheapest_of_all_sequences(problem: dict[str, Any]) -> None:
    markets, copies, rows = problem["markets"], problem["copies"], problem["rows"]
    best = min(
        price_of(sequence, markets, copies, problem["start"], rows)
        for sequence in itertools.product([None, *range(len(markets))], repeat=problem["deadline"])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if best == math.inf:
            with pytest.raises(ValueError, match=r"rows: .*, most until the deadline"):
                cheapest_moves(**problem)
            return
        found = cheapest_moves(**problem)
    assert found.total_price == pytest.approx(best, rel=1e-9, abs=1e-9)
    check(found, problem)


def check(found: Moves, problem: dict[str, Any]) -> None:
    """That the stays are as the price says."""
    assert sum(stay.rows for stay in found.stays) == pytest.approx(problem["rows"])
    assert sum(stay.price for stay in found.stays) == pytest.approx(found.total_price)
    assert found.stays[-1].to_hour <= problem["deadline"] * (1 + 1e-9)
    for before, after in itertools.pairwise(found.stays):
        assert before.to_hour <= after.from_hour
        if before.market != after.market:
            assert (before.market, after.market) in problem["copies"]


def day_and_night(**changes: Any) -> dict[str, Any]:
    day = Market(name="day", rows_per_second=1.0, prices=[4.0, 4.0, 1.0, 1.0])
    night = Market(name="night", rows_per_second=2.0, prices=[1.0, 1.0, 9.0, 9.0])
    copies = {("day", "night"): Copy(hours=0.5), ("night", "day"): Copy(hours=0.5, price=0.25)}
    given = {"markets": [day, night], "rows": 4.5 * HOUR, "deadline": 4, "copies": copies}
    return {**given, **changes}


def test_a_run_goes_where_it_is_cheap() -> None:
    found = cheapest_moves(**day_and_night())
    assert [(s.market, s.from_hour, s.to_hour) for s in found.stays] == [
        ("night", 0, 2),
        ("day", 2, 3),
    ]
    assert found.total_price == 2 + 0.25 + 1
    assert str(found).splitlines()[0] == "price 3.25, done in 3 hours"


def test_three_days_in_three_markets_are_soon_planned() -> None:
    markets = [
        Market(
            name=str(i),
            rows_per_second=1 + 0.1 * i,
            prices=[1 + (7 * i + 3 * h) % 11 for h in range(72)],
        )
        for i in range(3)
    ]
    copies = {
        pair: Copy(hours=0.1 + 0.2 * int(pair[1]), price=0.5)
        for pair in itertools.permutations("012", 2)
    }
    found = cheapest_moves(markets, rows=40 * HOUR, deadline=72, copies=copies)
    alone = min(
        cheapest_moves([market], rows=40 * HOUR, deadline=72, copies={}).total_price
        for market in markets
    )
    assert found.total_price < alone


def test_a_market_without_a_way_out_is_told() -> None:
    copies = {("day", "night"): Copy(hours=0.5)}
    with pytest.warns(UserWarning, match="market night: copies to other markets: 0, markets: 2: "):
        cheapest_moves(**day_and_night(copies=copies))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"copies": {("day", "night"): Copy(hours=1.5), ("night", "day"): Copy(hours=0)}},
            r"copies: day to night: 1\.5 hours, interval: 1\.0 hours",
        ),
        (
            {"copies": {("day", "dusk"): Copy(hours=0), ("night", "day"): Copy(hours=0)}},
            r"copies: \('day', 'dusk'\), it must be \(from, to\), two of: day, night",
        ),
        ({"copies": {("day", "day"): Copy(hours=0)}}, r"copies: \('day', 'day'\), it must be"),
        ({"copies": {"day": Copy(hours=0)}}, r"copies: 'day', it must be \(from, to\), two of"),
        ({"deadline": 5}, r"market day: prices of 4\.0 hours, deadline: 5 hours"),
        ({"rows": 90 * HOUR}, r"rows: 324000, most until the deadline of 4 hours: 28800"),
        ({"start": "dusk"}, "start: 'dusk', markets: day, night"),
        ({"markets": []}, r"markets: \[\]"),
        ({"interval": 0}, "interval: 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:market day")
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cheapest_moves(**day_and_night(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"copies": {("day", "night"): 0.5}},
            r"copies: \('day', 'night'\): 0.5 given, it must be a C",
        ),
        (
            {"copies": [("day", "night")]},
            r"copies: list given, it must be a dict of Copies by \(from",
        ),
        ({"copies": 0.5}, r"copies: 0.5 given, it must be a dict of Copies by \(from, to\)"),
        (
            {"markets": ["day", "night"]},
            r"markets: \['day', 'night'\] given, it must be a list of Ma",
        ),
        ({"markets": "day"}, "markets: 'day' given, it must be a list of Markets"),
        ({"markets": None}, "markets: None given, it must be a list of Markets"),
    ],
)
def test_the_kind_of_an_argument_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cheapest_moves(**day_and_night(**given))
