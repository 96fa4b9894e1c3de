"""What the stages did when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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
    ends when it does. A U has the batch's last microbatch.
    """

    stage: int
    replica: int
    kind: str
    batch: int
    microbatch: int
    version: int
    start: float
    end: float


class Timeline:
    """The actions that :meth:`PipelineModule.timeline` recorded, filled when its block ends."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.rows: list[Event] = []

    def add(
        self,
        replica: int,
        actions: Iterable[tuple[int, str, int, int, int, float, float]],
    ) -> None:
        """Appends a rank's actions: stage, kind, batch, microbatch, version, start, end."""
        self.rows.extend(Event(action[0], replica, *action[1:]) for action in actions)

    def gather(self) -> list[Event]:
        """All processes' actions on rank 0, [] elsewhere. Every rank calls it."""
        self._control.agree(Operation.gather_events, 0, Announcement)
        parts = self._control.gather([dataclasses.astuple(event) for event in self.rows])
        return sorted(Event(*row) for part in parts for row in part)
