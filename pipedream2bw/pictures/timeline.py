"""Draws what a pipeline did: one row for each rank, one box for each action, time to the right."""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..schedules.events import KIND_NAMES, Event, Row, number_batches, row_of, stages_of_rows

# One hue per weight version: light and dark, of which the kinds' shades are made.
_HUES = (
    ("#9ecae1", "#3182bd"),
    ("#fdd0a2", "#e6750c"),
    ("#a1d99b", "#31a354"),
    ("#dcc6e8", "#8856a7"),
    ("#fbb4c4", "#c51b5a"),
    ("#d9c7a7", "#8c6d31"),
)


_GREY = ("#d0d0d0", "#808080")  # the legend's


_BLACK = "#111111"


_LABELS_IN_BLACK = "FIR"


_HATCHES = {"R": "////"}  # white, over a forward's shade


_FONT_SIZE = 8.0


_SMALL_FONT_SIZE = 5.5


_DIGIT_POINTS = 5.2  # at _FONT_SIZE


_HEIGHT = 0.8  # of a row's boxes; rows are 1 apart


_BESIDE = 0.15  # of the height, for an update beside other actions


_STEP = 0.13  # by which the boxes of a rank's next stage are lower


_INCHES_PER_ROW = 0.5


_MARGIN_INCHES = 1.0  # for the rows' names


_LEAST_WIDTH_INCHES, _MOST_WIDTH_INCHES = 13.0, 30.0


_DPI = 130


_TIMES = (("seconds", 1.0, 10.0), ("milliseconds", 1e3, 10e-3), ("microseconds", 1e6, 0.0))


@dataclasses.dataclass(frozen=True)
class Picture:
    """What :func:`draw_timeline` drew, shown by notebooks; ``figure`` is matplotlib's."""

    figure: Any

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it; the suffix chooses the format (.png, .svg, .pdf)."""
        self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.figure.savefig(png, format="png")
        return png.getvalue()


def draw_timeline(
    events: Sequence[Event] | Mapping[str, Sequence[Event]],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "",
    unit: str = "seconds",
    width: float | None = None,
) -> Picture:
    """A picture of executed or simulated actions, such as ``Timeline.gather()`` gives.

    Each row is a rank (of a replica), each box an action: a forward (light) or backward (dark), in
    two parts an input gradient (between the two) and a weight gradient (darker), with its
    microbatch, or its batch and microbatch where there is room; if batches have only one
    microbatch, with its batch. A recomputed forward is hatched. The colour tells the weight version
    that is read. A black line is an update, its mark in the colour of the version that it makes; a
    bar above other actions if it goes on beside them. White is idle.

    Of a rank with several stages the boxes of the first are highest, of the last lowest, and a
    small number below a box's own is the stage.

    Args:
        events: the actions; or several lists of them by name (say, one per schedule), drawn under
            one another to one scale, each beginning at its own first action.
        path: where to write it, if at all; the suffix chooses the format (.png, .svg, .pdf). A
            notebook shows what is returned.
        title: above all.
        unit: what the actions' times count. Seconds become milliseconds or microseconds where they
            are few; any other unit is written below the time as it is.
        width: inches; if not given, 13, or up to 30 where the boxes would be too small for numbers.

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
    figure = matplotlib.figure.Figure(
        figsize=(width, _INCHES_PER_ROW * sum(heights) + extra), layout="constrained", dpi=_DPI
    )
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    ).flatten()
    unit, scale = time_unit(unit, span)
    for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
        points_per_time = 72 * max(width - _MARGIN_INCHES, width / 2) / span
        _Panel(axes, rows, scale, points_per_time, matplotlib).draw()
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


@dataclasses.dataclass(frozen=True)
class Matplotlib:
    """matplotlib's modules; no pyplot, so neither a display nor a global state is touched."""

    figure: Any
    lines: Any
    patches: Any

    @classmethod
    def load(cls, what: str) -> Matplotlib:
        try:
            names = (field.name for field in dataclasses.fields(cls))
            return cls(*(importlib.import_module(f"matplotlib.{name}") for name in names))
        except ImportError as error:
            raise ImportError(
                f"drawing {what} needs matplotlib, which cannot be imported ({error}): "
                "pip install matplotlib"
            ) from error


class _Panel:
    """The rows of one list of events."""

    def __init__(
        self,
        axes: Any,
        events: Sequence[Event],
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
        names = [_name(row, self._stages[row], several) for row in rows]
        self._axes.set_yticks(range(len(rows)), names)
        self._axes.set_ylim(len(rows) - 0.5, -0.5)
        self._axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            self._axes.spines[side].set_visible(False)

    def _draw_box(self, event: Event, box: tuple[float, float, float, float]) -> None:
        left, top, width, height = box
        face = _face(event.kind, _HUES[event.version % len(_HUES)])
        self._axes.add_patch(
            self._matplotlib.patches.Rectangle(
                (left, top),
                width,
                height,
                facecolor=face,
                edgecolor="white",
                linewidth=0.7,
                hatch=_HATCHES.get(event.kind),
            )
        )
        label = self._label(event)
        if not label:
            return
        style = {
            "ha": "center",
            "va": "center",
            "color": "black" if event.kind in _LABELS_IN_BLACK else "white",
        }
        middle = left + width / 2
        if len(self._stages[row_of(event)]) == 1:
            self._axes.text(middle, top + height / 2, label, fontsize=_FONT_SIZE, **style)
            return
        self._axes.text(middle, top + 0.36 * height, label, fontsize=_FONT_SIZE, **style)
        stage = str(event.stage)
        self._axes.text(middle, top + 0.8 * height, stage, fontsize=_SMALL_FONT_SIZE, **style)

    def _draw_update(self, event: Event, box: tuple[float, float, float, float]) -> None:
        # Often shorter than can be seen: the outline shows where, and covers no neighbour's number.
        left, top, width, height = box
        others = (e for e in self._events if e.kind != "U" and row_of(e) == row_of(event))
        if any(event.start <= other.start < event.end for other in others):
            height *= _BESIDE  # goes on beside them
        self._axes.add_patch(
            self._matplotlib.patches.Rectangle(
                (left, top),
                width,
                height,
                facecolor=_BLACK,
                edgecolor=_BLACK,
                linewidth=1.2,
                clip_on=False,
                zorder=3,
            )
        )
        made = _HUES[event.version % len(_HUES)][1]
        self._axes.plot(left + width / 2, top - 0.07, clip_on=False, **_update_mark(made))

    def _label(self, event: Event) -> str:
        """What fits into the box: batch and microbatch, one number, or nothing."""
        number = event.batch if self._number_batches else event.microbatch
        long = f"{event.kind} {event.batch}.{event.microbatch}"
        if self._number_batches:
            long = f"{event.kind} {event.batch}"
        points = self._points_per_time * (event.end - event.start)
        for label, spare in ((long, 2.0), (str(number), 0.4)):
            if _DIGIT_POINTS * (len(label) + spare) <= points:
                return label
        return ""


def _name(row: Row, stages: Sequence[int], several_replicas: bool) -> str:
    replica, rank = row
    name = f"stage {stages[0]}"
    if stages != [rank]:
        name = f"rank {rank}\nstages {', '.join(map(str, stages))}"
    return f"replica {replica}, {name}" if several_replicas else name


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


def time_unit(unit: str, span: float) -> tuple[str, float]:
    """The unit of the axis, and how many of them one of the events' units is."""
    if unit != "seconds":
        return unit, 1.0
    return next((name, scale) for name, scale, least in _TIMES if span >= least)


def _face(kind: str, hue: tuple[str, str]) -> str:
    light, dark = hue
    shades = {
        "F": light,
        "R": light,
        "B": dark,
        "I": _mixed(light, dark, 0.6),
        "W": _mixed(dark, _BLACK, 0.5),
    }
    return shades[kind]


def _mixed(a: str, b: str, share: float) -> str:
    """Colours of the form "#rrggbb": ``share`` of b, the rest of a."""
    parts = [
        round((1 - share) * int(a[i : i + 2], 16) + share * int(b[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _update_mark(colour: str) -> dict[str, Any]:
    return {"marker": "v", "markersize": 5, "color": colour, "linestyle": "", "zorder": 4}


def _legend(panels: Sequence[Sequence[Event]], matplotlib: Matplotlib) -> list[Any]:
    events = [event for rows in panels for event in rows]
    patch = matplotlib.patches.Patch
    kinds = {event.kind for event in events}
    handles = [
        patch(
            facecolor=_face(kind, _GREY),
            edgecolor="white",
            linewidth=0,
            hatch=_HATCHES.get(kind),
            label=f"{kind}: {name}",
        )
        for kind, name in KIND_NAMES.items()
        if kind in kinds and kind != "U"
    ]
    if "U" in kinds:
        mark = matplotlib.lines.Line2D([], [], **_update_mark(_BLACK), label="U: update")
        handles.append(mark)
    versions = sorted({event.version for event in events})
    for version in versions[: len(_HUES)]:
        again = version + len(_HUES)
        name = f"versions {version}, {again}, …" if again in versions else f"version {version}"
        handles.append(patch(facecolor=_HUES[version % len(_HUES)][1], label=f"weight {name}"))
    handles.append(patch(facecolor="white", edgecolor="#888888", label="white: idle"))
    meanings = {
        "batch (of one microbatch)" if number_batches(rows) else "[batch.]microbatch"
        for rows in panels
    }
    notes = [f"number: {', or '.join(sorted(meanings))}"]
    if any(len(stages) > 1 for rows in panels for stages in stages_of_rows(rows).values()):
        notes.append("higher to lower, small number: stage")
    return handles + [matplotlib.lines.Line2D([], [], linestyle="", label=note) for note in notes]
