"""Pictures by matplotlib: what timelines and plans have in common."""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
from collections.abc import Sequence
from typing import Any

DPI = 130

_TIME_UNITS = (("seconds", 1.0, 10.0), ("milliseconds", 1e3, 10e-3), ("microseconds", 1e6, 0.0))


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawn picture, which notebooks show; ``figure`` is matplotlib's."""

    figure: Any

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture; the suffix decides the format (.png, .svg, .pdf)."""
        self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.figure.savefig(png, format="png")
        return png.getvalue()


@dataclasses.dataclass(frozen=True)
class Matplotlib:
    """matplotlib's modules; no pyplot, so neither a display nor a global state is touched."""

    figure: Any
    lines: Any
    patches: Any

    @classmethod
    def load(cls, what: str) -> Matplotlib:
        """Imports the modules; raises ImportError that says what cannot be drawn without them."""
        try:
            names = (field.name for field in dataclasses.fields(cls))
            return cls(*(importlib.import_module(f"matplotlib.{name}") for name in names))
        except ImportError as error:
            raise ImportError(
                f"drawing {what} needs matplotlib, which cannot be imported ({error}): "
                "pip install matplotlib"
            ) from error

    def new_figure(self, width: float, height: float) -> Any:
        """An empty figure, in inches."""
        return self.figure.Figure(figsize=(width, height), layout="constrained", dpi=DPI)

    def legend_patch(self, label: str, colour: str, hatch: str | None = None) -> Any:
        """A legend's entry for boxes of this colour."""
        return self.patches.Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)

    def legend_line(self, label: str, **style: Any) -> Any:
        """A legend's entry for lines or marks; without a style a note."""
        return self.lines.Line2D([], [], label=label, **{"linestyle": "", **style})


def name_rows(axes: Any, names: Sequence[str], step: int = 1) -> None:
    """Writes names beside rows 0, 1, ..., from the top down; or beside every ``step``-th row."""
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def time_unit(unit: str, span: float) -> tuple[str, float]:
    """The unit of a time axis of some length, and how many of them a ``unit`` is."""
    if unit != "seconds":
        return unit, 1.0
    return next((name, scale) for name, scale, least in _TIME_UNITS if span >= least)
