"""Small pictures for notebooks: HTML with SVG in it, made of text alone.

Text has the page's own colour (``currentColor``) and nothing is drawn behind it, so that light and
dark pages both can be read. Whatever a user may have named is escaped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from . import colours

_MOST_ROWS = 64  # more would make a notebook's file large and say little
_ROW, _BAR = 18, 12  # heights, in pixels
_LETTER = 7  # a letter's width at 11 pixels, rather too wide
_AREA = 500  # width of what stands beside the rows' names
_MOST_NAME = 40  # letters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A row of bars behind each other, by kind; ``mark`` is a line across, ``text`` comes last."""

    name: str
    parts: Mapping[str, float]
    text: str = ""
    mark: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle on a numbered row; ``top`` and ``height`` are shares of the row's bar."""

    row: int
    start: float
    end: float
    colour: str
    top: float = 0.0
    height: float = 1.0


def html(title: str, *parts: str) -> str:
    """A picture: a line of text above its parts, which are HTML already."""
    return f'<div style="margin:.7em 0"><div><b>{escape(title)}</b></div>{"".join(parts)}</div>'


def note(text: str) -> str:
    """A line of smaller text."""
    return f'<div style="font-size:smaller">{escape(text)}</div>'


def printed(text: str, *, folded: bool = True) -> str:
    """What ``print()`` shows; folded, only a word is seen of it until it is clicked on."""
    pre = f"<pre>{escape(text)}</pre>"
    return f"<details><summary>as text</summary>{pre}</details>" if folded else pre


def legend(colours_by_name: Mapping[str, str]) -> str:
    """Names behind patches of their colours; the page breaks the line where it must."""
    entries = (
        f'<span style="white-space:nowrap;margin-right:1em"><span style="display:inline-block;'
        f'width:.8em;height:.8em;margin-right:.3em;background:{colour}"></span>{escape(name)}</span>'
        for name, colour in colours_by_name.items()
    )
    return f'<div style="font-size:smaller">{" ".join(entries)}</div>'


def bars(rows: Sequence[Bar], colours_by_kind: Mapping[str, str]) -> str:
    """Rows of stacked bars on one scale, with a legend of the kinds that are there."""
    shown = rows[:_MOST_ROWS]
    span = max([0.0, *(max(sum(row.parts.values()), row.mark or 0.0) for row in shown)]) or 1.0
    scale = _AREA / span
    boxes, marks = [], []
    for number, row in enumerate(shown):
        left = 0.0
        for kind in colours_by_kind:
            if amount := row.parts.get(kind, 0.0):
                end = left + amount
                boxes.append(Box(row=number, start=left, end=end, colour=colours_by_kind[kind]))
                left = end
        if row.mark is not None:
            marks.append(f"M{_short(scale * row.mark)} {_ROW * number + 1}v{_ROW - 2}")
    more = f'<path d="{"".join(marks)}" stroke="{colours.LIMIT}" stroke-width="2"/>' * bool(marks)
    kinds = {k: c for k, c in colours_by_kind.items() if any(r.parts.get(k, 0.0) for r in shown)}
    hidden = len(rows) - len(shown)
    return (
        _rows([row.name for row in shown], [row.text for row in shown], _paths(boxes, scale) + more)
        + (note(f"... and {hidden} more") if hidden else "")
        + legend(kinds)
    )


def boxes_in_time(names: Sequence[str], boxes: Iterable[Box], span: float) -> str:
    """Rows of boxes from time 0 to ``span``: one path for each colour, whichever comes first."""
    shown = names[:_MOST_ROWS]
    drawn = _paths((box for box in boxes if box.row < len(shown)), _AREA / (span or 1.0))
    hidden = len(names) - len(shown)
    return _rows(shown, (), drawn) + (note(f"... and {hidden} more rows") if hidden else "")


def _paths(boxes: Iterable[Box], scale: float) -> str:
    by_colour: dict[str, list[str]] = {}
    for box in boxes:
        left, width = scale * box.start, scale * (box.end - box.start)
        top = _ROW * box.row + (_ROW - _BAR) / 2 + _BAR * box.top
        height = _short(_BAR * box.height)
        by_colour.setdefault(box.colour, []).append(
            f"M{_short(left)} {_short(top)}h{_short(width)}v{height}h-{_short(width)}z"
        )
    return "".join(
        f'<path d="{"".join(outlines)}" fill="{colour}"/>' for colour, outlines in by_colour.items()
    )


def _rows(names: Sequence[str], texts: Sequence[str], drawn: str) -> str:
    """The picture of names, what is drawn beside them, and texts behind that."""
    names = [name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…" for name in names]
    left = round(_LETTER * max(map(len, names), default=0)) + 8
    right = left + _AREA + 8
    width = right + round(_LETTER * max(map(len, texts), default=0))
    height = _ROW * len(names)
    words = "".join(
        f'<text x="{x}" y="{_ROW * row + 13}">{escape(text)}</text>'
        for x, column in ((0, names), (right, texts))
        for row, text in enumerate(column)
        if text
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width:100%;height:auto;display:block" role="img" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">{words}'
        f'<g transform="translate({left})" stroke="#000" stroke-opacity=".4" '
        f'stroke-width=".5">{drawn}</g></svg>'
    )


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
