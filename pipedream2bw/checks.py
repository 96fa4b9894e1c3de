"""Checks of numbers that callers give."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence


def check_number(
    name: str,
    value: object,
    *,
    above: float = 0.0,
    at_least: float | None = None,
    below: float | None = None,
) -> None:
    """Checks that a value is a number within bounds.

    Args:
        above: the bound that the value must exceed, unless ``at_least`` is given.
        at_least: the least value that is allowed.
        below: the bound that the value must stay below; with ``math.inf`` it must be finite.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is out of bounds, or not a number in the sense of IEEE 754.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r} given, it must be a number")
    is_low = not above < value if at_least is None else not at_least <= value
    # An int may be finite and yet too large for a float.
    is_high = below is not None and not (
        value <= sys.float_info.max if below == math.inf else value < below
    )
    if is_low or is_high:
        raise ValueError(f"{name}: {value}, it must be {bounds(above, at_least, below)}")


def bounds(above: float = 0.0, at_least: float | None = None, below: float | None = None) -> str:
    """Says in words within which bounds :func:`check_number` wants a number."""
    rule = f"> {above:g}" if at_least is None else f">= {at_least:g}"
    return rule + {None: "", math.inf: " and finite"}.get(below, f" and < {below}")


def check_whole_number(
    name: str, value: object, at_least: int = 1, at_most: int | None = None
) -> None:
    """Raises TypeError if a value is no int, ValueError if it is not within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} given, it must be an int")
    if value < at_least:
        raise ValueError(f"{name}: {value}, it must be at least {at_least}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}: {value}, it must be at most {at_most}")


def check_microbatches_of_replicas(given: Sequence[object], width: int) -> tuple[int, ...]:
    """Checks numbers of microbatches, one for each replica, and returns them.

    Raises:
        TypeError: one is not an int.
        ValueError: one is below 1, or there is another number of them than of replicas.
    """
    for replica, number in enumerate(given):
        check_whole_number(f"num_microbatches[{replica}]", number)
    if len(given) != width:
        raise ValueError(
            f"num_microbatches: {list(given)}, width: {width}: give a number for each replica, or "
            "one for all"
        )
    return tuple(given)  # type: ignore[arg-type]
