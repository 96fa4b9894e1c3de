"""Checks of numbers that callers give."""

from __future__ import annotations

import math


def check_number(
    name: str, value: object, *, above: float = 0.0, below: float | None = None
) -> None:
    """Raises TypeError unless the value is a number, ValueError unless it is between the two."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r} given, it must be a number")
    if not above < value or not (below is None or value < below):  # nor is NaN
        bounds = {None: "", math.inf: " and finite"}.get(below, f" and < {below}")
        raise ValueError(f"{name}: {value}, it must be > {above:g}{bounds}")


def check_whole_number(name: str, value: object, at_least: int = 1) -> None:
    """Raises TypeError unless the value is an int, ValueError unless it is large enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} given, it must be an int")
    if value < at_least:
        raise ValueError(f"{name}: {value}, it must be at least {at_least}")
