"""Groups of batches that are trained in several ways in turns, and how the ways differ."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from pipedream2bw.runtime.timeline import Event

from .report import Figure


@dataclasses.dataclass
class Group:
    """Batches that a rank trained in one way, one after the other.

    Attributes:
        seconds: of each batch.
        processor: seconds that all threads of this process computed.
        during_save: how many of its batches, from the first one on, began while a save was under
            way, and the one in which it began.
        idle: the share of the time in which each stage of this process did nothing.
        idle_around: the same of the first batches alone, as many as any save took.
    """

    way: str
    seconds: list[float]
    processor: float
    during_save: int = 0
    idle: dict[int, float] = dataclasses.field(default_factory=dict)
    idle_around: dict[int, float] = dataclasses.field(default_factory=dict)


def seconds_of(groups: Sequence[Group], way: str) -> list[float]:
    """Of each batch that was trained in this way."""
    return [seconds for group in groups if group.way == way for seconds in group.seconds]


def added_time(groups: Sequence[Group], way: str) -> float:
    """The share that a round's groups of one way take longer than those without saving."""
    return sum(seconds_of(groups, way)) / sum(seconds_of(groups, "none")) - 1


def added_processor_time(by_rank: Sequence[Sequence[Group]], way: str) -> float:
    """The share that all ranks compute more in a round's groups of one way."""

    def total(of_way: str) -> float:
        return sum(g.processor for groups in by_rank for g in groups if g.way == of_way)

    return total(way) / total("none") - 1


def tail(groups: Sequence[Group], way: str) -> float:
    """The 99th percentile of the batch times over their median."""
    seconds = seconds_of(groups, way)
    return statistics.quantiles(seconds, n=100, method="inclusive")[98] / statistics.median(seconds)


def note_idleness(groups: Sequence[Group], events: Sequence[Event], first: int) -> None:
    """Tells each group how long its stages did nothing.

    A save takes a few of a group's batches: over all of them a stop would hardly be seen.

    Args:
        events: of a timeline that goes on to the batch after the last group.
        first: the first group's first batch.
    """
    around = max((group.during_save for group in groups), default=0)
    for stage in {event.stage for event in events}:
        of_stage = [e for e in events if e.stage == stage and e.kind != "U"]
        begin = first
        for group in groups:
            end = begin + len(group.seconds)
            group.idle[stage] = _idle_share(of_stage, begin, end)
            group.idle_around[stage] = _idle_share(of_stage, begin, begin + max(1, around))
            begin = end


def _idle_share(events: Sequence[Event], begin: int, end: int) -> float:
    """Of the time from one batch's first action of a stage to that of another one."""
    busy = sum(e.end - e.start for e in events if begin <= e.batch < end)
    starts = [min(e.start for e in events if e.batch == at) for at in (begin, end)]
    return 1 - busy / (starts[1] - starts[0])


def idle(by_rank: Sequence[Sequence[Group]], way: str, *, around: bool = False) -> float:
    """The share of a round in which the stage with the greatest one did nothing.

    Args:
        around: only in the batches that a save takes.
    """

    def shares(group: Group) -> dict[int, float]:
        return group.idle_around if around else group.idle

    return max(
        statistics.mean(shares(group)[stage] for group in groups if group.way == way)
        for groups in by_rank
        for stage in shares(groups[0])
    )


def figures_of_idleness(
    setting: str, by_round: Sequence[Sequence[Sequence[Group]]]
) -> list[Figure]:
    """How much longer the idlest stage did nothing in a round's groups with saves than without."""
    name = "further idle share of the idlest stage"
    return [
        Figure(
            setting,
            f"{name}, while a save is under way" if around else name,
            [
                idle(each, "saving", around=around) - idle(each, "none", around=around)
                for each in by_round
            ],
            at_most=0.02,
        )
        for around in (False, True)
    ]
