"""What the rows of a picture are: ranks, and the stages that each has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .timeline import Event

Row = tuple[int, int]
"""A replica and one of its ranks."""


def row_of(event: Event) -> Row:
    """The row on which the action is drawn."""
    return event.replica, event.rank


def stages_of_rows(events: Iterable[Event]) -> dict[Row, list[int]]:
    """The rows in order, each with its stages in order."""
    stages: dict[Row, set[int]] = {}
    for event in events:
        stages.setdefault(row_of(event), set()).add(event.stage)
    return {row: sorted(stages[row]) for row in sorted(stages)}


def number_batches(events: Sequence[Event]) -> bool:
    """Whether actions are told apart by their batch, since no batch has two microbatches."""
    return len({event.microbatch for event in events}) == 1
