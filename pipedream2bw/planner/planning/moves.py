"""The cheapest way of a run through markets whose prices change by the hour.

A run may stop, copy its state to another market and go on there, or wait. Gavel (arXiv 2008.09213)
gives the rows per second of each kind of devices, :class:`Throughputs` those of a model's plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...checks import check_number
from ...rules import instance
from ...table import table
from .cluster import is_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Market:
    """Devices that can be rented, and what a plan does on them.

    Attributes:
        name: of the market.
        rows_per_second: of the plan there.
        prices: of all of its devices for an hour, in each interval from now on.
    """

    name: str
    rows_per_second: float
    prices: Sequence[float]

    def __post_init__(self) -> None:
        where = f"market {self.name}"
        check_number(f"{where}: rows_per_second", self.rows_per_second, below=math.inf)
        for i, price in enumerate(self.prices):
            check_number(f"{where}: prices[{i}]", price, at_least=0, below=math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of a run's state from one market to another.

    Attributes:
        hours: that it takes, in which the devices it goes to are paid and compute nothing.
        price: of what is sent.
    """

    hours: float
    price: float = 0.0


class Stay(NamedTuple):
    """A part of a run in one market: hours from now, copy included, and what it does and costs."""

    market: str
    from_hour: float
    to_hour: float
    rows: float
    price: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
    """What :func:`cheapest_moves` finds.

    Attributes:
        stays: in their order; between two of them the run waits.
        total_price: of all of them.
    """

    stays: tuple[Stay, ...]
    total_price: float

    def __str__(self) -> str:
        rows = [
            [
                each.market,
                f"{each.from_hour:.4g}",
                f"{each.to_hour:.4g}",
                f"{each.rows:.6g}",
                f"{each.price:.4g}",
            ]
            for each in self.stays
        ]
        title = f"price {self.total_price:.4g}, done in {self.stays[-1].to_hour:.4g} hours"
        return table(title, ("market", "from hour", "to hour", "rows", "price"), rows)


class _State(NamedTuple):
    """What has been paid and trained up to an interval, and how."""

    price: float
    rows: float
    stays: tuple[object, ...] = ()
    """The last stay, and the tuple of those before it."""


def cheapest_moves(
    markets: Sequence[Market],
    *,
    rows: float,
    deadline: float,
    copies: Mapping[tuple[str, str], Copy],
    start: str | None = None,
    interval: float = 1.0,
) -> Moves:
    """Finds the cheapest sequence of markets that trains so many rows in time.

    In each interval the run trains in one market or waits. It moves at the beginning of one, and
    the last interval ends when all rows are trained. Exact, by dynamic programming over intervals:
    of the ways to a market none is kept that costs as much as another and has trained no more.

    >>> from pipedream2bw.planner.planning.moves import Copy, Market, cheapest_moves
    >>> day = Market(name="day", rows_per_second=1.0, prices=[4.0, 4.0, 1.0, 1.0])
    >>> night = Market(name="night", rows_per_second=1.0, prices=[1.0, 1.0, 4.0, 4.0])
    >>> hour = {("day", "night"): Copy(hours=0.5), ("night", "day"): Copy(hours=0.5)}
    >>> found = cheapest_moves([day, night], rows=3.5 * 3600, deadline=4, copies=hour)
    >>> [stay.market for stay in found.stays], found.total_price
    (['night', 'day'], 4.0)

    Args:
        markets: at least one.
        rows: to be trained.
        deadline: hours from now.
        copies: by the markets that they go from and to; where there is none, there is no way.
        start: the market that has the state; None: any may begin.
        interval: hours of each price.

    Raises:
        ValueError: not so many rows can be trained in time; prices end before the deadline; or a
            copy takes an interval or more.
        TypeError: an argument is of a wrong type.

    Warns:
        UserWarning: a market has no copy to another one: a run there stays to its end.
    """
    by_name = _checked(markets, rows, deadline, copies, start, interval)
    states = {name: [_State(0.0, 0.0)] for name in by_name if start in (None, name)}
    best: tuple[float, float, tuple[object, ...]] | None = None
    for step in range(math.ceil(deadline / interval - 1e-9)):
        begin = step * interval
        length = min(interval, deadline - begin)
        reached = {name: list(held) for name, held in states.items()}  # those that wait
        for origin, held in states.items():
            for name, market in by_name.items():
                copy = Copy(hours=0.0) if name == origin else copies.get((origin, name))
                if copy is None or copy.hours >= length:
                    continue
                per_hour = 3600 * market.rows_per_second
                for state in held:
                    hours = copy.hours + (rows - state.rows) / per_hour
                    ends = hours <= length * (1 + 1e-12)
                    hours = min(hours, length)
                    price = copy.price + hours * market.prices[step]
                    trained = rows - state.rows if ends else (hours - copy.hours) * per_hour
                    stay = Stay(name, begin, begin + hours, trained, price)
                    now = _State(state.price + price, state.rows + trained, (stay, state.stays))
                    if not ends:
                        reached.setdefault(name, []).append(now)
                    elif best is None or (now.price, begin + hours) < best[:2]:
                        best = now.price, begin + hours, now.stays
        states = {name: _undominated(held) for name, held in reached.items()}
    if best is None:
        most = max(state.rows for held in states.values() for state in held)
        raise ValueError(
            f"rows: {rows:.6g}, most until the deadline of {deadline} hours: {most:.6g}: there "
            "must be time for all. Give a later deadline, or faster markets"
        )
    return Moves(stays=_joined(best[2]), total_price=best[0])


def _checked(
    markets: Sequence[Market],
    rows: float,
    deadline: float,
    copies: Mapping[tuple[str, str], Copy],
    start: str | None,
    interval: float,
) -> dict[str, Market]:
    """The markets by name."""
    for what, value in (("rows", rows), ("deadline", deadline), ("interval", interval)):
        check_number(what, value, below=math.inf)
    if not is_list(markets) or not all(isinstance(each, Market) for each in markets):
        raise TypeError(f"markets: {markets!r} given, it must be a list of Markets")
    by_name = {market.name: market for market in markets}
    known = ", ".join(by_name)
    if not by_name or len(by_name) < len(markets):
        raise ValueError(
            f"markets: {[each.name for each in markets]}: there must be some, of different names"
        )
    if start is not None and start not in by_name:
        raise ValueError(f"start: {start!r}, markets: {known}: it must be one of these")
    instance("a dict of Copies by (from, to)", Mapping).check("copies", copies)
    for pair, copy in copies.items():
        instance("a Copy", Copy).check(f"copies: {pair!r}", copy)
        if pair not in itertools.permutations(by_name, 2):
            raise ValueError(f"copies: {pair!r}, it must be (from, to), two of: {known}")
        origin, target = pair
        check_number(f"copies: {origin} to {target}: hours", copy.hours, at_least=0)
        check_number(f"copies: {origin} to {target}: price", copy.price, at_least=0, below=math.inf)
        if copy.hours >= interval:
            raise ValueError(
                f"copies: {origin} to {target}: {copy.hours} hours, interval: {interval} hours: a "
                "copy must take less. Leave it out, or give prices of longer intervals"
            )
    for market in markets:
        if len(market.prices) * interval < deadline * (1 - 1e-9):
            raise ValueError(
                f"market {market.name}: prices of {len(market.prices) * interval} hours, deadline: "
                f"{deadline} hours: it must have prices until then"
            )
        if len(markets) > 1 and not any(origin == market.name for origin, _ in copies):
            warnings.warn(
                f"market {market.name}: copies to other markets: 0, markets: {len(markets)}: a run "
                "there stays to its end. Give copies= a way out",
                stacklevel=3,
            )
    return by_name


def _undominated(states: list[_State]) -> list[_State]:
    """The states that have trained more than all that cost as much or less."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda each: (each.price, -each.rows)):
        if not kept or state.rows > kept[-1].rows:
            kept.append(state)
    return kept


def _joined(linked: tuple[object, ...]) -> tuple[Stay, ...]:
    """The stays in their order, those in one market without a wait between them as one."""
    stays: list[Stay] = []
    while linked:
        stay, linked = linked  # type: ignore[assignment]
        assert isinstance(stay, Stay)
        if stays and (stays[-1].market, stays[-1].from_hour) == (stay.market, stay.to_hour):
            after = stays.pop()
            stay = stay._replace(
                to_hour=after.to_hour, rows=stay.rows + after.rows, price=stay.price + after.price
            )
        stays.append(stay)
    return tuple(reversed(stays))
