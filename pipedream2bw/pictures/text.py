"""Draws a run as text: one row for each stage, time to the right in equal columns.

    stage 0 |F0F1....B0==f0B1=Uf1b0==..b1==u
    stage 1 |..F0B0==F1B1=Uf0b0==f1b1==U....

A column shows what the stage did at the column's middle. So lengths are proportional to durations,
and an action's columns begin where those of the action before it end. If a rank has several stages,
their rows stand together, and a stage is blank, not idle, while the rank does another's work:

    rank 0 stage 0 |F0F1    ....
    rank 0 stage 2 |    F0F1....
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from ..schedules.events import KIND_NAMES, Event, Row, number_batches, row_of, stages_of_rows
from ..units import format_seconds

# Fills an action's columns after its label.
_FILL = {"F": "-", "B": "=", "I": "~", "W": "+", "R": "^"}

_IDLE = "."
_ELSEWHERE = " "  # the rank is not idle, but the stage is
_DEFAULT_WIDTH = 100
_LEAST_COLUMNS = 10
_TOLERANCE = 1e-6  # of a duration or a column: clocks and sums are rounded


def draw_text(events: Sequence[Event], *, width: int | None = None, unit: str = "seconds") -> str:
    """Draws executed or simulated actions as text, such as ``Timeline.gather()`` gives them.

    Each row is a stage (of a replica), and the stages of a rank stand together. An action is shown
    by its kind and microbatch; the letters of every second batch are small. If no batch has more
    than one microbatch, the number is the batch. An action too short for its number is the letter
    alone; an action shorter than a column is shown where it hides no other action's label, but an
    update always. An update during other actions is shown where it begins. A legend below explains
    the letters, and gives the time of a column and the number of actions that are not shown.

    Args:
        events: the actions, in any order.
        width: characters of the longest line; default: the terminal's width, or 100 without one.
        unit: the unit of the actions' times; short times in seconds are shown in ms or us.

    Returns:
        The lines, without a newline at the end.

    Raises:
        ValueError: there are no events, or the width leaves no room beside the rows' names.
    """
    if not events:
        raise ValueError(
            "events: 0, a picture needs at least 1; only rank 0 gets events from Timeline.gather()"
        )
    if width is None:
        width = shutil.get_terminal_size((_DEFAULT_WIDTH, 1)).columns
    ranks = stages_of_rows(events)
    names = [_name(row, stages, stage, ranks) for row, stages in ranks.items() for stage in stages]
    margin = max(map(len, names)) + 2
    columns = width - margin
    if columns < _LEAST_COLUMNS:
        raise ValueError(
            f"width: {width}, the rows' names: {margin} characters: the picture needs a width of "
            f"at least {margin + _LEAST_COLUMNS}"
        )
    origin = min(event.start for event in events)
    per_second = _columns_per_second(events, columns - 1)
    # One column more than the run takes, for the updates that end it.
    span = max(event.end for event in events) - origin
    columns = min(columns, math.ceil(span * per_second - _TOLERANCE) + 1)
    by_batch = number_batches(events)
    pictures = []
    num_hidden = 0
    for row, stages in ranks.items():
        of_rank = []
        for stage in stages:
            actions = _one_at_a_time(
                event for event in events if row_of(event) == row and event.stage == stage
            )
            labels = [_label(event, by_batch) for event in actions]
            owners = _owners(actions, labels, origin, per_second, columns)
            num_hidden += len(set(range(len(actions))) - set(owners))
            of_rank.append(_rendered(actions, labels, owners))
        pictures += _blank_where_another_works(of_rank)
    lines = [
        f"{name:<{margin - 2}} |{picture}" for name, picture in zip(names, pictures, strict=True)
    ]
    kinds = {event.kind for event in events}
    legend = [
        *(f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in kinds),
        "number: batch" if by_batch else "number: microbatch",
        "small letters: every second batch",
        f"{_IDLE} idle",
        *(["blank: the rank's other stages"] if len(names) > len(ranks) else []),
        f"a column: {_duration(1 / per_second, unit)}",
        *([f"actions too short to be seen: {num_hidden}"] if num_hidden else []),
    ]
    return "\n".join([*lines, *textwrap.wrap(", ".join(legend), width)])


def _name(row: Row, stages: Sequence[int], stage: int, ranks: Iterable[Row]) -> str:
    replica, rank = row
    name = f"stage {stage}" if stages == [rank] else f"rank {rank} stage {stage}"
    return f"replica {replica} {name}" if len({replica for replica, _ in ranks}) > 1 else name


def _one_at_a_time(actions: Iterable[Event]) -> list[Event]:
    """The actions in order of time; an update during other actions gets no duration."""
    in_order = sorted(actions, key=lambda event: (event.start, event.end))
    others = [event.start for event in in_order if event.kind != "U"]
    return [
        dataclasses.replace(event, end=event.start)
        if event.kind == "U" and any(event.start <= start < event.end for start in others)
        else event
        for event in in_order
    ]


def _blank_where_another_works(of_rank: Sequence[str]) -> list[str]:
    return [
        "".join(
            _ELSEWHERE if own == _IDLE and set(column) != {_IDLE} else own
            for own, column in zip(picture, zip(*of_rank, strict=True), strict=True)
        )
        for picture in of_rank
    ]


def _label(event: Event, by_batch: bool) -> str:
    kind = event.kind if event.batch % 2 == 0 else event.kind.lower()
    if event.kind == "U":
        return kind
    return f"{kind}{event.batch if by_batch else event.microbatch}"


def _columns_per_second(events: Sequence[Event], columns: int) -> float:
    """The columns that a second gets, rounded down so that equal actions get equal widths."""
    span = max(event.end for event in events) - min(event.start for event in events)
    if span <= 0:
        return 1.0
    durations = [event.end - event.start for event in events if event.end > event.start]
    # Simulated durations are often multiples of one. Then a whole number of columns for that one
    # avoids a pattern of actions that are now n, now n + 1 columns long.
    unit = min(durations)
    fit = math.floor(columns * unit / span * (1 + _TOLERANCE))
    if fit >= 1 and all(
        math.isclose(d / unit, round(d / unit), rel_tol=_TOLERANCE) for d in durations
    ):
        return fit / unit
    return columns / span


def _owners(
    actions: Sequence[Event],
    labels: Sequence[str],
    origin: float,
    per_second: float,
    columns: int,
) -> list[int | None]:
    """For each column the number of the action that it shows, None where the stage is idle."""

    def first_column(seconds: float) -> int:
        """The first column whose middle is not before a time."""
        return math.ceil((seconds - origin) * per_second - 0.5 - _TOLERANCE)

    owners: list[int | None] = [None] * columns
    short = []
    for number, action in enumerate(actions):
        begin, end = first_column(action.start), first_column(action.end)
        owners[begin:end] = [number] * (end - begin)
        if begin >= end:
            short.append((number, begin))

    def price(column: int, taker: Event) -> float:
        """The loss if an action takes a column: 0 nothing, 1 filling, 2 a number, 3 a letter."""
        owner = owners[column]
        if owner is None:
            return 0
        left = owners.count(owner) - 1
        if left >= len(labels[owner]):
            return 1
        # Updates show where a batch ends, and are always short.
        if taker.kind != "U" or actions[owner].kind == "U":
            return math.inf
        return 2 if left > 0 else 3

    last = -1
    for number, begin in short:
        within = math.floor((actions[number].start - origin) * per_second + _TOLERANCE)
        # Of two idle columns the one that the action lies in, else the end of the action before.
        choices = [
            (price(column, actions[number]), owners[column] is None and column != within, column)
            for column in (begin - 1, begin)
            if column > last
        ]
        if choices and min(choices)[0] < math.inf:
            last = min(choices)[2]
            owners[last] = number
    return owners


def _rendered(actions: Sequence[Event], labels: Sequence[str], owners: Sequence[int | None]) -> str:
    text = ""
    for column, owner in enumerate(owners):
        if owner is None:
            text += _IDLE
            continue
        label = labels[owner]
        if owners.count(owner) < len(label):
            label = label[0]  # a part of a number would be another number
        position = column - owners.index(owner)
        fill = _FILL.get(actions[owner].kind, label)
        text += label[position] if position < len(label) else fill
    return text


def _duration(time: float, unit: str) -> str:
    return format_seconds(time) if unit == "seconds" else f"{time:.3g} {unit}"
