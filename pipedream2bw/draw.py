"""Draws what a pipeline did: one row for each stage, one box for each action, time to the right."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .timeline import Event

# One hue per weight version, forward light and backward dark; told apart in greyscale by lightness.
# Of a backward in two parts the input gradient is dark, the weight gradient, for which nobody
# waits, between the two.
_HUES = (
    ("#9ecae1", "#3182bd"),
    ("#fdd0a2", "#e6750c"),
    ("#a1d99b", "#31a354"),
    ("#dcc6e8", "#8856a7"),
    ("#fbb4c4", "#c51b5a"),
    ("#d9c7a7", "#8c6d31"),
)
_UPDATE_FACE = "#252525"
_ROW_HEIGHT = 0.8
_INCHES_PER_ROW = 0.5
_WIDTH_INCHES = 13.0
_DPI = 130
_LONG_SECONDS = 10.0  # from here on the axis is in seconds, below in milliseconds


def draw_timeline(
    events: Sequence[Event] | Mapping[str, Sequence[Event]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
) -> None:
    """Writes a picture of executed actions, such as ``Timeline.gather()`` gives.

    Each row is a stage (of a replica), each box an action: a forward (light) or backward (dark; if
    in two parts the input gradient dark, the weight gradient between) with its batch and
    microbatch, or an update (black). The colour tells the weight version that
    was read, or made in the case of an update's coloured edge. White is idle.

    Args:
        events: the actions; or several lists of them by name (say, one per schedule), drawn under
            one another to one scale, each beginning at its own first action.
        path: the picture; the suffix chooses the format (.png, .svg, .pdf).
        title: above all.

    Raises:
        ValueError: no events.
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
    figure_class, patches = _matplotlib()
    heights = [len(_rows_of(rows)) for rows in panels.values()]
    span = max(max(e.end for e in rows) - rows[0].start for rows in panels.values())
    unit, scale = ("seconds", 1.0) if span >= _LONG_SECONDS else ("milliseconds", 1e3)
    extra = 0.62 * len(panels) + 0.85  # inches for the axes' own titles, the legend and the time
    figure = figure_class(
        figsize=(_WIDTH_INCHES, _INCHES_PER_ROW * sum(heights) + extra),
        layout="constrained",
        dpi=_DPI,
    )
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    ).flatten()
    for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, rows, span, scale, patches)
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")
    all_axes[-1].set_xlabel(unit)
    if title:
        figure.suptitle(title, fontsize=12)
    legend = _legend({event.kind for rows in panels.values() for event in rows}, patches)
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=len(legend) if len(legend) <= 4 else 3,  # what the width has room for
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def _matplotlib() -> tuple[Any, Any]:
    """Figure and patches; no pyplot, so neither a display nor a global state is touched."""
    try:
        figure = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError as error:
        raise ImportError(
            f"drawing a timeline needs matplotlib, which cannot be imported ({error}): "
            "pip install matplotlib"
        ) from error
    return figure.Figure, patches


def _rows_of(events: Sequence[Event]) -> list[tuple[int, int]]:
    return sorted({(event.replica, event.stage) for event in events})


def _draw_panel(
    axes: Any, events: Sequence[Event], span: float, scale: float, patches: Any
) -> None:
    rows = _rows_of(events)
    origin = events[0].start
    characters_per_second = _WIDTH_INCHES / span * 13  # at font size 8
    # Updates last, since they are short and must not vanish under their neighbours.
    for event in sorted(events, key=lambda e: e.kind == "U"):
        y = rows.index((event.replica, event.stage))
        light, dark = _HUES[event.version % len(_HUES)]
        left, width = scale * (event.start - origin), scale * (event.end - event.start)
        if event.kind == "U":
            # Never thinner than can be seen.
            width = max(width, scale * span * 0.004)
            style = {"facecolor": _UPDATE_FACE, "edgecolor": dark, "linewidth": 1.5}
        else:
            face = _face(event.kind, light, dark)
            style = {"facecolor": face, "edgecolor": "white", "linewidth": 0.7}
        axes.add_patch(patches.Rectangle((left, y - _ROW_HEIGHT / 2), width, _ROW_HEIGHT, **style))
        label = _label(event, (event.end - event.start) * characters_per_second)
        if label:
            colour = "black" if event.kind == "F" else "white"
            axes.text(
                left + width / 2, y, label, ha="center", va="center", fontsize=8, color=colour
            )
    many_replicas = len({replica for replica, _ in rows}) > 1
    axes.set_yticks(
        range(len(rows)),
        [f"replica {r}, stage {s}" if many_replicas else f"stage {s}" for r, s in rows],
    )
    axes.set_xlim(0, scale * span * 1.004)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(event: Event, characters: float) -> str:
    """What fits into the box: batch and microbatch, the microbatch alone, or nothing."""
    if event.kind == "U":
        return ""
    long, short = f"{event.kind} {event.batch}.{event.microbatch}", str(event.microbatch)
    if len(long) + 2 <= characters:
        return long
    if len(short) + 0.5 <= characters:
        return short
    return ""


def _face(kind: str, light: str, dark: str) -> str:
    if kind == "F":
        return light
    return _middle(light, dark) if kind == "W" else dark


def _middle(a: str, b: str) -> str:
    """The colour half-way between two of the form "#rrggbb"."""
    parts = [(int(a[i : i + 2], 16) + int(b[i : i + 2], 16)) // 2 for i in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _legend(kinds: set[str], patches: Any) -> list[Any]:
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    handles = [
        patches.Patch(facecolor=_face(kind, *_HUES[0]), label=f"{kind} batch.microbatch: {name}")
        for kind, name in names.items()
        if kind in kinds
    ]
    return [
        *handles,
        patches.Patch(facecolor=_UPDATE_FACE, label="update"),
        patches.Patch(
            facecolor="white", edgecolor="#888888", label="white: idle; colour: weight version"
        ),
    ]
