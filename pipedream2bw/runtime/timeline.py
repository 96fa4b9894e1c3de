"""Records what the stages of a pipeline did when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..ranks.agreement import Announcement, ControlPlane, Operation
from ..schedules.events import Event


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
