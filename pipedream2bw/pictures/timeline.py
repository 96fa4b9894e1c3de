"""Draws what a pipeline did: one row for each rank, one box for each action, time to the right."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..colours import BLACK, VERSION_COLOURS, kind_colour, version_colours
from ..schedules.events import (
    KIND_NAMES,
    Event,
    number_batches,
    row_name,
    row_of,
    stages_of_rows,
)
from .canvas import Matplotlib, Picture, name_rows, time_unit

_LEGEND_COLOURS = ("#d0d0d0", "#808080")
_LABELS_IN_BLACK = "FIR"
_HATCHES = {"R": "////"}  # white, over a forward's colour

_FONT_SIZE = 8.0
_SMALL_FONT_SIZE = 5.5
_DIGIT_POINTS = 5.2  # at _FONT_SIZE

_HEIGHT = 0.8  # of a row's boxes; rows are 1 apart
_BESIDE = 0.15  # of the height, for an update beside other actions
_STEP = 0.13  # by which the boxes of a rank's next stage are lower

_INCHES_PER_ROW = 0.5
_MARGIN_INCHES = 1.0  # for the rows' names
_LEAST_WIDTH_INCHES, _MOST_WIDTH_INCHES = 13.0, 30.0


def draw_timeline(
    events: Sequence[Event] | Mapping[str, Sequence[Event]],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "",
    unit: str = "seconds",
    width: float | None = None,
) -> Picture:
    """Draws executed or simulated actions, such as ``Timeline.gather()`` gives.

    Each row is a rank (of a replica), each box an action: a light box is a forward, a dark one a
    backward; of a backward in two parts the input gradient is lighter, the weight gradient darker.
    A recomputed forward is hatched. The number is the microbatch, or batch and microbatch where
    there is room; if batches have only one microbatch, it is the batch. The colour is the weight
    version that the action reads. A black line is an update, or a thin bar where other actions run
    at the same time; its mark has the colour of the version that it makes. White is idle.

    If a rank has several stages, the boxes of its first stage are highest, and those of the last
    lowest. The small number below is the stage.

    Args:
        events: the actions; or several lists of them by name (say, one per schedule), drawn below
            each other on one scale, each from its own first action on.
        path: a file to write; its suffix decides the format (.png, .svg, .pdf). A notebook shows
            the picture that is returned.
        title: a line above the picture.
        unit: the unit of the actions' times. Short times in seconds are shown in milliseconds or
            microseconds; any other unit stands below the time axis as it is.
        width: inches; default: 13, or up to 30 where the boxes would be too small for numbers.

    Raises:
        ValueError: no events, or a width that is not positive.
        ImportError: matplotlib is not installed.
    """
    panels = {"": events} if not isinstance(events, Mapping) else events
    panels = {name: sorted(rows, key=lambda e: e.start) for name, rows in panels.items()}
    if not panels or not all(panels.values()):
        empty = [name for name, rows in panels.items() if not rows]
        raise ValueError(
            f"events: none to draw ({len(panels)} lists, empty ones: {empty}); only rank 0 gets "
            "events from Timeline.gather()"
        )
    span = max(max(e.end for e in rows) - rows[0].start for rows in panels.values()) or 1.0
    if width is None:
        width = _fitting_width(list(panels.values()), span)
    if not 0 < width < float("inf"):
        raise ValueError(f"width: {width}, it must be > 0 and finite")
    matplotlib = Matplotlib.load("a timeline")
    heights = [len(stages_of_rows(rows)) for rows in panels.values()]
    extra = 0.62 * len(panels) + 1.1  # inches for the panels' titles, the time and the legend
    figure = matplotlib.new_figure(width, _INCHES_PER_ROW * sum(heights) + extra)
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    ).flatten()
    unit, scale = time_unit(unit, span)
    for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
        points = 72 * max(width - _MARGIN_INCHES, width / 2) / span
        _Panel(axes, rows, scale=scale, points_per_time=points, matplotlib=matplotlib).draw()
        axes.set_xlim(0, scale * span)
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold", pad=8)
    all_axes[-1].set_xlabel(unit)
    if title:
        figure.suptitle(title, fontsize=12)
    figure.legend(
        handles=_legend(list(panels.values()), matplotlib),
        loc="outside lower center",
        ncols=max(2, int(width / 3)),
        frameon=False,
        fontsize=9,
    )
    picture = Picture(figure)
    if path is not None:
        picture.save(path)
    return picture


class _Panel:
    """The rows of one list of events."""

    def __init__(
        self,
        axes: Any,
        events: Sequence[Event],
        *,
        scale: float,
        points_per_time: float,
        matplotlib: Matplotlib,
    ) -> None:
        self._axes, self._events = axes, events
        self._scale, self._points_per_time = scale, points_per_time
        self._matplotlib = matplotlib
        self._stages = stages_of_rows(events)
        self._number_batches = number_batches(events)

    def draw(self) -> None:
        rows = list(self._stages)
        for event in self._events:
            row = row_of(event)
            stages = self._stages[row]
            height = _HEIGHT - _STEP * min(len(stages) - 1, 3)
            # However many stages, the rows' height is the same.
            step = (_HEIGHT - height) / max(len(stages) - 1, 1)
            top = rows.index(row) - _HEIGHT / 2 + step * stages.index(event.stage)
            left = self._scale * (event.start - self._events[0].start)
            width = self._scale * (event.end - event.start)
            draw = self._draw_update if event.kind == "U" else self._draw_box
            draw(event, (left, top, width, height))
        several = len({replica for replica, _ in rows}) > 1
        names = [row_name(row, self._stages[row]).replace(": ", "\n") for row in rows]
        if several:
            names = [f"replica {r}, {name}" for (r, _), name in zip(rows, names, strict=True)]
        name_rows(self._axes, names)

    def _draw_box(self, event: Event, box: tuple[float, float, float, float]) -> None:
        colour = kind_colour(event.kind, version_colours(event.version))
        hatch = _HATCHES.get(event.kind)
        self._fill(box, facecolor=colour, edgecolor="white", linewidth=0.7, hatch=hatch)
        label = self._label(event)
        if not label:
            return
        texts = [(label, 0.5, _FONT_SIZE)]
        if len(self._stages[row_of(event)]) > 1:
            texts = [(label, 0.36, _FONT_SIZE), (str(event.stage), 0.8, _SMALL_FONT_SIZE)]
        left, top, width, height = box
        style = {"ha": "center", "va": "center"}
        style["color"] = "black" if event.kind in _LABELS_IN_BLACK else "white"
        for text, share, size in texts:
            self._axes.text(left + width / 2, top + share * height, text, fontsize=size, **style)

    def _draw_update(self, event: Event, box: tuple[float, float, float, float]) -> None:
        # Often shorter than can be seen: the outline shows where, and covers no neighbour's number.
        left, top, width, height = box
        others = (e for e in self._events if e.kind != "U" and row_of(e) == row_of(event))
        if any(event.start <= other.start < event.end for other in others):
            height *= _BESIDE  # goes on beside them
        style = {"facecolor": BLACK, "edgecolor": BLACK, "linewidth": 1.2}
        self._fill((left, top, width, height), **style, clip_on=False, zorder=3)
        mark = _update_mark(version_colours(event.version)[1])
        self._axes.plot(left + width / 2, top - 0.07, clip_on=False, **mark)

    def _fill(self, box: tuple[float, float, float, float], **style: Any) -> None:
        left, top, width, height = box
        rectangle = self._matplotlib.patches.Rectangle((left, top), width, height, **style)
        self._axes.add_patch(rectangle)

    def _label(self, event: Event) -> str:
        """The longest label that fits into the box: batch and microbatch, a number, or none."""
        number, long = event.microbatch, f"{event.kind} {event.batch}.{event.microbatch}"
        if self._number_batches:
            number, long = event.batch, f"{event.kind} {event.batch}"
        points = self._points_per_time * (event.end - event.start)
        for label, spare in ((long, 2.0), (str(number), 0.4)):
            if _DIGIT_POINTS * (len(label) + spare) <= points:
                return label
        return ""


def _fitting_width(panels: Sequence[Sequence[Event]], span: float) -> float:
    """Inches with which the typical forward has room for its number."""
    typical = []
    for rows in panels:
        digits = max(len(str(e.batch if number_batches(rows) else e.microbatch)) for e in rows)
        shortest: dict[str, list[float]] = {}
        for event in rows:
            if event.kind != "U" and event.end > event.start:
                shortest.setdefault(event.kind, []).append(event.end - event.start)
        typical += [
            statistics.median(durations) / (digits + 0.5) for durations in shortest.values()
        ]
    needed = _MARGIN_INCHES + span * _DIGIT_POINTS / (72 * min(typical)) if typical else 0.0
    return min(max(needed, _LEAST_WIDTH_INCHES), _MOST_WIDTH_INCHES)


def _update_mark(colour: str) -> dict[str, Any]:
    return {"marker": "v", "markersize": 5, "color": colour, "linestyle": "", "zorder": 4}


def _legend(panels: Sequence[Sequence[Event]], matplotlib: Matplotlib) -> list[Any]:
    events = [event for rows in panels for event in rows]
    kinds = {event.kind for event in events}
    handles = [
        matplotlib.legend_patch(
            f"{kind}: {name}", kind_colour(kind, _LEGEND_COLOURS), _HATCHES.get(kind)
        )
        for kind, name in KIND_NAMES.items()
        if kind in kinds and kind != "U"
    ]
    if "U" in kinds:
        handles.append(matplotlib.legend_line("U: update", **_update_mark(BLACK)))
    versions = sorted({event.version for event in events})
    for version in versions[: len(VERSION_COLOURS)]:
        again = version + len(VERSION_COLOURS)
        name = f"versions {version}, {again}, …" if again in versions else f"version {version}"
        handles.append(matplotlib.legend_patch(f"weight {name}", version_colours(version)[1]))
    idle = {"facecolor": "white", "edgecolor": "#888888", "label": "white: idle"}
    handles.append(matplotlib.patches.Patch(**idle))
    meanings = {
        "batch (of one microbatch)" if number_batches(rows) else "[batch.]microbatch"
        for rows in panels
    }
    notes = [f"number: {', or '.join(sorted(meanings))}"]
    if any(len(stages) > 1 for rows in panels for stages in stages_of_rows(rows).values()):
        notes.append("small number: stage")
    return handles + [matplotlib.legend_line(note) for note in notes]
