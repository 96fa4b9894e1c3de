"""A small picture of actions in time, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from .. import svg
from ..colours import kind_colour, version_colours
from .events import KIND_NAMES, Event, row_name, row_of, stages_of_rows

_MOST_EVENTS = 3000  # of which a picture takes some 70 kB
_NOTHING = "no actions"
_UPDATE = "currentColor"  # black would not be seen on a dark page


def timeline_html(
    events: Sequence[Event], title: str, *, unit: str = "", span: float | None = None
) -> str:
    """Draws actions as boxes, a row for each rank; of many those that ended last.

    A light box is a forward, a dark one a backward, and the colour is the weight version, as in
    :func:`draw_timeline`. A thin line in the text's colour is an update.

    Args:
        unit: of their times, after a blank.
        span: the time that the picture's width stands for, to compare several; their own if None.
    """
    if not events:
        return svg.html(title, svg.note(_NOTHING))
    shown = sorted(events, key=lambda event: event.end)[-_MOST_EVENTS:]
    begin, end = min(event.start for event in shown), shown[-1].end
    stages = stages_of_rows(shown)
    numbers = {row: number for number, row in enumerate(stages)}
    several = len({replica for replica, _ in stages}) > 1
    names = [
        f"replica {row[0]}, {row_name(row, held)}" if several else row_name(row, held)
        for row, held in stages.items()
    ]
    # Updates last: they are thin, and lie over what runs beside them.
    boxes = [
        _box(event, numbers[row_of(event)], stages[row_of(event)], begin)
        for event in sorted(shown, key=lambda event: event.kind == "U")
    ]
    hidden = len(events) - len(shown)
    left_out = f"the first {hidden} actions are left out; " if hidden else ""
    kinds = {event.kind for event in shown}
    versions = sorted({event.version for event in shown})[:2]
    of_versions = {
        f"{KIND_NAMES[kind]}, W({version})": kind_colour(kind, version_colours(version))
        for version in versions
        for kind in KIND_NAMES
        if kind in kinds - {"U"}
    }
    updates = {KIND_NAMES["U"]: _UPDATE} if "U" in kinds else {}
    return svg.html(
        title,
        svg.boxes_in_time(names, boxes, end - begin if span is None else span),
        svg.legend({**of_versions, **updates}),
        svg.note(f"{left_out}{len(shown)} actions in {end - begin:.4g}{unit}"),
    )


def _box(event: Event, row: int, stages: Sequence[int], begin: float) -> svg.Box:
    """A box as high as the rank has room for each of its stages."""
    share = 1.0 / len(stages)
    top = share * stages.index(event.stage)
    start, end = event.start - begin, event.end - begin
    if event.kind == "U":
        return svg.Box(row=row, start=start, end=end, colour=_UPDATE, top=top, height=share / 4)
    colour = kind_colour(event.kind, version_colours(event.version))
    return svg.Box(row=row, start=start, end=end, colour=colour, top=top, height=share)
