"""Groups of batches that are trained in several ways in turns, and how the ways differ."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass
class Group:
    """Batches that a rank trained in one way, one after the other.

    Attributes:
        seconds: of each batch.
        processor: seconds that all threads of this process computed.
        idle: the share of the time in which each stage of this process did nothing.
    """

    way: str
    seconds: list[float]
    processor: float
    idle: dict[int, float] = dataclasses.field(default_factory=dict)


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


def idle(by_rank: Sequence[Sequence[Group]], way: str) -> float:
    """The share of a round in which the stage with the greatest one did nothing."""
    return max(
        statistics.mean(group.idle[stage] for group in groups if group.way == way)
        for groups in by_rank
        for stage in groups[0].idle
    )
