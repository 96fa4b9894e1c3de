"""Records what the stages of a pipeline did when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .. import _C
from ..ranks.agreement import Announcement, ControlPlane, Operation
from ..schedules.events import Event


class Timeline:
    """The actions that :meth:`PipelineModule.timeline` recorded, filled when its block ends."""

    def __init__(self, control: ControlPlane, placement: Sequence[int]) -> None:
        self._control = control
        self._placement = placement
        self.rows: list[Event] = []

    def add(self, replica: int, actions: Iterable[_C.ExecutedAction]) -> None:
        """Appends a rank's actions."""
        self.rows.extend(
            Event(
                stage=action.stage,
                replica=replica,
                kind=action.kind,
                batch=action.run,
                microbatch=action.microbatch,
                version=action.version,
                start=action.start,
                end=action.end,
                rank=self._placement[action.stage],
            )
            for action in actions
        )

    def gather(self) -> list[Event]:
        """All processes' actions on rank 0, [] elsewhere. Every rank calls it."""
        self._control.agree(Operation.gather_events, 0, Announcement)
        parts = self._control.gather([dataclasses.astuple(event) for event in self.rows])
        return sorted(Event(*row) for part in parts for row in part)
