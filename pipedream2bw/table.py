"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of text with aligned columns: the first is flush left, the others flush right."""
    lines = [title]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells[1:]]))
    return "\n".join(lines)
