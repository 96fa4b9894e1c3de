"""Amounts as people write them: "16GiB", "25 GB/s"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

_BANDWIDTHS = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    **{f"{prefix}bit/s": size / 8 for prefix, size in (("M", 1e6), ("G", 1e9), ("T", 1e12))},
}

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bytes(name: str, given: object) -> float:
    """Bytes from "16GiB", "16 GB" (10^9) or a number of bytes; they are > 0, or infinite.

    Raises:
        TypeError: it is neither a text nor a number.
        ValueError: it has another unit or is not > 0: names the field, what was given and what is
            allowed.
    """
    return _parse(name, given, _BYTES, "GiB", allows_zero=False)


def parse_bandwidth(name: str, given: object) -> float:
    """Bytes per second from "25GB/s", "100 Gbit/s" or a number; raises as :func:`parse_bytes`."""
    return _parse(name, given, _BANDWIDTHS, "GB/s", allows_zero=False)


def parse_seconds(name: str, given: object) -> float:
    """Seconds from "5us" or a number, >= 0; raises as :func:`parse_bytes`."""
    seconds = _parse(name, given, _SECONDS, "us", allows_zero=True)
    if math.isinf(seconds):
        raise ValueError(f"{name}: {given!r}, it must be finite")
    return seconds


def _parse(
    name: str, given: object, units: Mapping[str, float], example: str, *, allows_zero: bool
) -> float:
    if isinstance(given, bool) or not isinstance(given, (str, int, float)):
        raise TypeError(
            f"{name}: {given!r} given, it must be a number or a text like '16{example}'"
        )
    if isinstance(given, str):
        match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(\S+)\s*", given)
        if match is None or match[2] not in units:
            raise ValueError(
                f"{name}: {given!r} given, it must be a number and one of {', '.join(units)}, "
                f"like '16{example}'"
            )
        try:
            value = float(match[1]) * units[match[2]]
        except ValueError:
            raise ValueError(f"{name}: {given!r} given, {match[1]!r} is no number") from None
    else:
        try:
            value = float(given)
        except OverflowError:
            raise ValueError(f"{name}: {given!r} given, it is too large for a number") from None
    if not (value >= 0 if allows_zero else value > 0):
        raise ValueError(f"{name}: {given!r} given, it must be {'>=' if allows_zero else '>'} 0")
    return value


BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def unit_for(amount: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit that an amount has one of, or the smallest, and its size."""
    return next((unit for unit in units if amount >= unit[1]), units[-1])


def format_bytes(size: float) -> str:
    """A number of bytes for people, like "1.50 GiB"."""
    unit, one = unit_for(size, BYTE_UNITS)
    return f"{size / one:.{0 if one == 1 else 2}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A time for people, like "1.5 ms"."""
    unit, one = unit_for(seconds, _TIME_UNITS)
    return f"{seconds / one:.3g} {unit}"
