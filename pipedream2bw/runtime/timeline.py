"""Records when each action of a pipeline was executed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from ..ranks.operations import Announcement, Operation
from ..schedules.events import Event
from ..schedules.small_picture import timeline_html
from ..units import format_seconds
from .session import Session


class Timeline:
    """The actions that :meth:`PipelineModule.timeline` recorded, filled when its block ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: list[Event] = []

    def gather(self) -> list[Event]:
        """All processes' actions on rank 0, [] elsewhere. Every rank calls it."""
        with self._session.ending.lost_ranks_close():
            self._session.agree(Operation.gather_events, 0, Announcement)
        return sorted(itertools.chain(*self._session.gather(self.rows)))

    def __repr__(self) -> str:
        return f"Timeline({self._in_words}; draw_text() draws its rows)"

    @property
    def _in_words(self) -> str:
        stages = sorted({event.stage for event in self.rows})
        said = f"{len(self.rows)} actions of stages {stages}"
        if not self.rows:
            return said
        seconds = max(event.end for event in self.rows) - min(event.start for event in self.rows)
        return f"{said} in {format_seconds(seconds)}"

    def _repr_html_(self) -> str:
        return timeline_html(self.rows, f"In this process: {self._in_words}", unit=" s")


@contextlib.contextmanager
def recording(session: Session) -> Iterator[Timeline]:
    """Records the actions executed inside; drains at its end."""
    session.ending.check_open()
    timeline = Timeline(session)
    session.stages.record("a timeline")
    try:
        yield timeline
        session.flush_for(Operation.end_of_timeline)
    finally:
        records = session.stages.take_record()
        timeline.rows.extend(
            Event(
                stage=action.stage,
                replica=session.grid.replica,
                kind=action.kind,
                batch=action.run,
                microbatch=action.microbatch,
                version=action.version,
                start=action.start,
                end=action.end,
                rank=session.schedule.placement[action.stage],
            )
            for action in (records if session.grid.shard == 0 else ())
        )
