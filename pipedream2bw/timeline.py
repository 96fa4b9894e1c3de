"""What the stages did when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .control import Announcement, ControlPlane, Operation

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputed forward",
    "U": "update",
}


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """One action, executed or simulated.

    ``kind`` is "F", "B" (or its halves "I", the input gradient, and "W", the weight gradient), "U",
    or "R" for a forward that is run again before its backward; ``version`` is the weight version
    that they read and that U made; ``start`` and ``end`` are seconds of the machine's monotonic
    clock, which all its processes share, or of a simulation. An executed B that sends gradients
    ends when it does. ``batch`` counts ``train_step`` calls, of which several may be one batch of
    the optimizer's (``accumulate``); a U has the last one's number and microbatch.
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


class Timeline:
    """The actions that :meth:`PipelineModule.timeline` recorded, filled when its block ends."""

    def __init__(self, control: ControlPlane, placement: Sequence[int]) -> None:
        self._control = control
        self._placement = placement
        self.rows: list[Event] = []

    def add(
        self,
        replica: int,
        actions: Iterable[tuple[int, str, int, int, int, float, float]],
    ) -> None:
        """Appends a rank's actions: stage, kind, batch, microbatch, version, start, end."""
        self.rows.extend(
            Event(action[0], replica, *action[1:], rank=self._placement[action[0]])
            for action in actions
        )

    def gather(self) -> list[Event]:
        """All processes' actions on rank 0, [] elsewhere. Every rank calls it."""
        self._control.agree(Operation.gather_events, 0, Announcement)
        parts = self._control.gather([dataclasses.astuple(event) for event in self.rows])
        return sorted(Event(*row) for part in parts for row in part)
