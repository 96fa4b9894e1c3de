"""Draws a plan: the time of a microbatch on every stage, and what each device holds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..colours import LIMIT, MEMORY_COLOURS, TIME_COLOURS
from ..json_document import given_or_loaded
from ..pictures.canvas import Matplotlib, Picture, name_rows, time_unit
from ..units import BYTE_UNITS, unit_for
from .planning.plan import (
    MEMORY_KINDS,
    Plan,
    bytes_of_rank,
    layers_in_words,
    limit_of_rank,
    rank_name,
    times_of,
)

_MESSAGES = list(TIME_COLOURS)[-1]
_MEMORY_COLOURS = {kind: MEMORY_COLOURS[kind] for kind in MEMORY_KINDS}
_HATCHES = {"forward again": "////"}
_BATCH_LINE = {"color": "#333333", "linestyle": "--", "linewidth": 1.2}
_LIMIT_LINE = {"color": LIMIT, "linestyle": "-", "linewidth": 1.8}

_WIDTH_INCHES = 13.0
_INCHES_PER_ROW, _LEAST_INCHES_PER_ROW = 0.42, 0.17
_ROOMY = 12.0  # inches that all rows may take before they become narrower
_MOST_INCHES = 40.0
_BAR, _THIN_BAR = 0.74, 0.3  # of a row


def draw_plan(
    plan: Plan | str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Picture:
    """Draws a plan: bars of time on the left, of memory on the right.

    The left side has a row for each stage: the time of one microbatch, and a line at the time that
    the pipeline takes per microbatch; between bar and line the stage is idle, or hides messages.
    The right side has a row for each rank of a replica: the bytes of all stages that it holds at
    their peak, and a mark at its device's limit.

    Args:
        plan: what :func:`plan` made, or the path where it was saved.
        path: a file to write; its suffix decides the format (.png, .svg, .pdf). A notebook shows
            the picture that is returned.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: neither a plan nor a path is given.
        ValueError, OSError: the file holds no plan, or cannot be read.
    """
    plan = given_or_loaded("plan", plan, Plan)
    matplotlib = Matplotlib.load("a plan")
    ranks = plan.shape.stages_of_ranks
    rows = max(plan.num_stages, len(ranks))
    per_row = max(min(_INCHES_PER_ROW, _ROOMY / rows), _LEAST_INCHES_PER_ROW)
    height = min(max(per_row * rows, 1.2), _MOST_INCHES)
    figure = matplotlib.new_figure(_WIDTH_INCHES, height + 1.7)
    times, memory = figure.subplots(1, 2)
    legends = (
        _draw_times(times, plan, ranks, matplotlib),
        _draw_memory(memory, plan, ranks, matplotlib),
    )
    for side, handles in zip(("left", "right"), legends, strict=True):
        figure.legend(
            handles=handles, loc=f"outside lower {side}", ncols=3, frameon=False, fontsize=9
        )
    figure.suptitle(plan.in_words, fontsize=12, fontweight="bold")
    picture = Picture(figure)
    if path is not None:
        picture.save(path)
    return picture


def _draw_times(
    axes: Any, plan: Plan, ranks: Sequence[Sequence[int]], matplotlib: Matplotlib
) -> list[Any]:
    """Draws the left side, and returns the legend's entries."""
    bars = [times_of(stage) for stage in plan.stages]
    per_microbatch = plan.seconds_per_batch / plan.most_microbatches
    alone = all(len(stages) == 1 for stages in ranks)  # a stage has all of its rank's time
    longest = max(sum(bar.values()) for bar in bars)
    span = max(longest, per_microbatch) if alone else longest
    unit, scale = time_unit("seconds", span)
    for row, bar in enumerate(bars):
        _draw_bar(axes, row, bar, scale, TIME_COLOURS)
    handles = [
        matplotlib.legend_patch(name, colour, _HATCHES.get(name))
        for name, colour in TIME_COLOURS.items()
        if any(bar[name] > 0 for bar in bars)
    ]
    if alone:
        axes.axvline(scale * per_microbatch, **_BATCH_LINE)
        handles.append(matplotlib.legend_line("the pipeline's time per microbatch", **_BATCH_LINE))
    names = [f"stage {i}: {layers_in_words(stage)}" for i, stage in enumerate(plan.stages)]
    _finish(axes, names, f"{unit} of one microbatch", scale * span)
    return handles


def _draw_bar(
    axes: Any, row: int, parts: Mapping[str, float], scale: float, colours: Mapping[str, str]
) -> None:
    left = 0.0
    for name, colour in colours.items():
        axes.barh(
            row,
            scale * parts[name],
            left=scale * left,
            height=_THIN_BAR if name == _MESSAGES else _BAR,
            color=colour,
            hatch=_HATCHES.get(name),
            edgecolor="white",
            linewidth=0.6,
        )
        left += parts[name]


def _draw_memory(
    axes: Any, plan: Plan, ranks: Sequence[Sequence[int]], matplotlib: Matplotlib
) -> list[Any]:
    """Draws the right side, and returns the legend's entries."""
    bars = [bytes_of_rank(plan, stages) for stages in ranks]
    limits = [limit_of_rank(plan, rank) for rank in range(len(ranks))]
    span = max(sum(bar.values()) for bar in bars)
    span = max([span, *(limit for limit in limits if limit < math.inf)])
    unit, size = unit_for(span, BYTE_UNITS)
    for row, (bar, limit) in enumerate(zip(bars, limits, strict=True)):
        _draw_bar(axes, row, bar, 1 / size, _MEMORY_COLOURS)
        if limit < math.inf:
            axes.plot([limit / size] * 2, [row - 0.5, row + 0.5], **_LIMIT_LINE)
    names = [rank_name(plan, rank, stages) for rank, stages in enumerate(ranks)]
    _finish(axes, names, f"{unit} of a device at its peak", span / size)
    return [
        *(matplotlib.legend_patch(name, colour) for name, colour in _MEMORY_COLOURS.items()),
        matplotlib.legend_line("limit of the device", **_LIMIT_LINE),
    ]


def _finish(axes: Any, names: Sequence[str], label: str, span: float) -> None:
    step = -(-len(names) // int(_MOST_INCHES / _LEAST_INCHES_PER_ROW))
    name_rows(axes, names, step)
    axes.set_xlim(0, 1.04 * span)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
