"""Actions that stages executed, and the rows of a picture that they are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .. import _C

KIND_NAMES = _C.action_kinds()
"""The kinds of actions and their names, as the engine has them."""


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """One action, executed or simulated.

    ``kind`` is "F", "B", "U", or "R" for a forward that is run again before its backward. A B's
    halves are "I", the input gradient, and "W", the weight gradient. ``version`` is the weight
    version that they read and that U made; ``start`` and ``end`` are seconds of the machine's
    monotonic clock, which all its processes share, or of a simulation. An executed B that sends
    gradients ends when it does. ``batch`` counts ``train_step`` calls, of which several may be one
    batch of the optimizer's (``accumulate``); a U has the last one's number and microbatch.
    ``rank`` is the schedule's rank that has the stage; the stage's own number if not given.
    """

    stage: int
    replica: int
    kind: str
    batch: int
    microbatch: int
    version: int
    start: float
    end: float
    rank: int = -1

    def __post_init__(self) -> None:
        if self.rank == -1:
            object.__setattr__(self, "rank", self.stage)


Row = tuple[int, int]
"""A row of a picture: a replica and one of its ranks."""


def row_of(event: Event) -> Row:
    """The row on which the action is drawn."""
    return event.replica, event.rank


def stages_of_rows(events: Iterable[Event]) -> dict[Row, list[int]]:
    """The rows in order, each with its stages in order."""
    stages: dict[Row, set[int]] = {}
    for event in events:
        stages.setdefault(row_of(event), set()).add(event.stage)
    return {row: sorted(stages[row]) for row in sorted(stages)}


def row_name(row: Row, stages: Sequence[int]) -> str:
    """The name of a rank's row: "stage 1", or "rank 1: stages 1, 3" of a rank with several."""
    _, rank = row
    if stages == [rank]:
        return f"stage {rank}"
    return f"rank {rank}: stages {', '.join(map(str, stages))}"


def number_batches(events: Sequence[Event]) -> bool:
    """Returns whether pictures number actions by batch, since no batch has two microbatches."""
    return len({event.microbatch for event in events}) == 1
