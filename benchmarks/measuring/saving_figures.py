"""What was measured of saves: of batches with and without them, and as often as they may be."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from .groups import (
    Group,
    added_processor_time,
    added_time,
    figures_of_idleness,
    seconds_of,
    tail,
)
from .report import Figure

EVERY = 10
"""Batches from save to save, in a group that saves."""
WAYS = ("none", "saving", "dcp")
SLOWER = 4
"""How many times as long the disk takes in the end."""
P99 = "p99 of batch times over the median"


@dataclasses.dataclass
class Automatic:
    """What was found on one speed of the disk.

    Attributes:
        batches_to_adapt: trained until the frequency had followed the disk's speed.
        between: batches from one save to the next, at the end of each round.
        added: the share of the time that saving added, of each round.
    """

    batches_to_adapt: int
    between: list[float]
    added: list[float]


@dataclasses.dataclass
class Measured:
    """What a rank gives."""

    rounds: list[list[Group]]
    automatic: list[Automatic]


def figures_of_training(ranks: Sequence[list[list[Group]]]) -> list[Figure]:
    rounds = ranks[0]
    by_round = list(zip(*ranks, strict=True))
    together = [group for groups in rounds for group in groups]
    every = f"every {EVERY} batches"
    computed = {way: [added_processor_time(each, way) for each in by_round] for way in WAYS}
    alone = [statistics.mean(seconds_of(groups, "none")) for groups in rounds]
    added = {way: [added_time(groups, way) for groups in rounds] for way in WAYS}
    return [
        Figure("no saving", "seconds per batch", alone),
        Figure("no saving", P99, [tail(together, "none")]),
        Figure(every, "added time", added["saving"], at_most=0.01, ideal=0.0),
        Figure(every, "added processor time", computed["saving"]),
        Figure(every, P99, [tail(together, "saving")], at_most=1.1),
        *figures_of_idleness(every, by_round),
        Figure(f"dcp.async_save {every}, drained", "added time", added["dcp"]),
        Figure(f"dcp.async_save {every}, drained", "added processor time", computed["dcp"]),
    ]


def figures_of_saves_alone(where: str, ranks: Sequence[Measured]) -> list[Figure]:
    rounds = ranks[0].rounds
    together = [group for groups in rounds for group in groups]
    alone = [statistics.mean(seconds_of(groups, "none")) for groups in rounds]
    added = [added_time(groups, "saving") for groups in rounds]
    setting = f"every {EVERY} batches, {where}"
    figures = [
        Figure(f"no saving, {where}", "seconds per batch", alone),
        Figure(f"no saving, {where}", P99, [tail(together, "none")]),
        Figure(setting, "added time", added, at_most=0.01, ideal=0.0),
        Figure(setting, P99, [tail(together, "saving")], at_most=1.1),
        *figures_of_idleness(setting, list(zip(*(rank.rounds for rank in ranks), strict=True))),
    ]
    for speed, found in zip(
        ("auto, 20 MB/s", f"auto, then {SLOWER} times slower"), ranks[0].automatic, strict=False
    ):
        figures += [
            Figure(speed, "batches until it had followed", [found.batches_to_adapt]),
            Figure(speed, "batches between saves", found.between),
            Figure(speed, "added time", found.added, at_most=0.035),
        ]
    return figures
