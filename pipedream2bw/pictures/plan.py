"""Draws a plan: the time of a microbatch on every stage, and what each device holds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..json_document import given_or_loaded
from ..planning.plan import MEMORY_KINDS, Plan, bytes_of_rank, limit_of_rank
from ..planning.stage_plan import StagePlan
from ..planning.units import BYTE_UNITS, unit_for
from .canvas import Matplotlib, Picture, name_rows, time_unit

_MESSAGES = "messages to and from later stages"
_AGAIN = "forward again"

_TIME_COLOURS = {
    "forward": "#9ecae1",
    _AGAIN: "#9ecae1",
    "backward: input gradient": "#4292c6",
    "backward: weight gradient": "#08519c",
    _MESSAGES: "#fd8d3c",
}
_HATCHES = {_AGAIN: "////"}
_MEMORY_COLOURS = dict(zip(MEMORY_KINDS, ("#31a354", "#a1d99b", "#8c6d31", "#dcc6e8"), strict=True))
_BATCH_LINE = {"color": "#333333", "linestyle": "--", "linewidth": 1.2}
_LIMIT_LINE = {"color": "#c51b1b", "linestyle": "-", "linewidth": 1.8}

_WIDTH_INCHES = 13.0
_INCHES_PER_ROW, _LEAST_INCHES_PER_ROW = 0.42, 0.17
_ROOMY = 12.0  # inches that all rows may take before they become narrower
_MOST_INCHES = 40.0
_BAR, _THIN_BAR = 0.74, 0.3  # of a row
_MOST_DEVICES = 4  # that a row names


def device_list(devices: Sequence[int]) -> str:
    """Names the devices that hold a stage, or the first few of them."""
    more = ", ..." if len(devices) > _MOST_DEVICES else ""
    return ", ".join(map(str, devices[:_MOST_DEVICES])) + more


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
    figure.suptitle(_title(plan), fontsize=12, fontweight="bold")
    picture = Picture(figure)
    if path is not None:
        picture.save(path)
    return picture


def _title(plan: Plan) -> str:
    chunks = f", {plan.stages_per_rank} on a device" if plan.stages_per_rank > 1 else ""
    replicas = "1 replica" if plan.width == 1 else f"{plan.width} replicas"
    rows = "1 row" if plan.microbatch_rows == 1 else f"{plan.microbatch_rows} rows"
    return (
        f"{plan.schedule}: {replicas} of {plan.num_stages} stages{chunks}, "
        f"{plan.microbatches_in_words} microbatches of {rows}; "
        f"{plan.seconds_per_batch:.3g} s a batch, {plan.rows_per_second:.4g} rows/s, "
        f"bubble {100 * plan.bubble:.1f} %"
    )


def _draw_times(
    axes: Any, plan: Plan, ranks: Sequence[Sequence[int]], matplotlib: Matplotlib
) -> list[Any]:
    """Draws the left side, and returns the legend's entries."""
    bars = [_times_of(stage) for stage in plan.stages]
    per_microbatch = plan.seconds_per_batch / plan.most_microbatches
    alone = all(len(stages) == 1 for stages in ranks)  # a stage has all of its rank's time
    longest = max(sum(bar.values()) for bar in bars)
    span = max(longest, per_microbatch) if alone else longest
    unit, scale = time_unit("seconds", span)
    for row, bar in enumerate(bars):
        _draw_bar(axes, row, bar, scale, _TIME_COLOURS)
    handles = [
        matplotlib.legend_patch(name, colour, _HATCHES.get(name))
        for name, colour in _TIME_COLOURS.items()
        if any(bar[name] > 0 for bar in bars)
    ]
    if alone:
        axes.axvline(scale * per_microbatch, **_BATCH_LINE)
        handles.append(matplotlib.legend_line("the pipeline's time per microbatch", **_BATCH_LINE))
    names = [f"stage {i}: {_layers(stage)}" for i, stage in enumerate(plan.stages)]
    _finish(axes, names, f"{unit} of one microbatch", scale * span)
    return handles


def _times_of(stage: StagePlan) -> dict[str, float]:
    """Seconds of one microbatch, by the name in the legend."""
    times = (stage.forward, stage.recompute, stage.input_grad, stage.weight_grad, 2 * stage.message)
    return dict(zip(_TIME_COLOURS, times, strict=True))


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


def _layers(stage: StagePlan) -> str:
    first, end = stage.layers
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


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
    names = [_rank_name(plan, rank, stages) for rank, stages in enumerate(ranks)]
    _finish(axes, names, f"{unit} of a device at its peak", span / size)
    return [
        *(matplotlib.legend_patch(name, colour) for name, colour in _MEMORY_COLOURS.items()),
        matplotlib.legend_line("limit of the device", **_LIMIT_LINE),
    ]


def _rank_name(plan: Plan, rank: int, stages: Sequence[int]) -> str:
    devices = plan.stages[rank].devices
    name = f"device{'s' * (len(devices) > 1)} {device_list(devices)}"
    if list(stages) == [rank]:
        return name
    return f"{name}: stages {', '.join(str(stage % plan.num_stages) for stage in stages)}"


def _finish(axes: Any, names: Sequence[str], label: str, span: float) -> None:
    step = -(-len(names) // int(_MOST_INCHES / _LEAST_INCHES_PER_ROW))
    name_rows(axes, names, step)
    axes.set_xlim(0, 1.04 * span)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
