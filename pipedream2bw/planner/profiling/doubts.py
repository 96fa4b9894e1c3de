"""Measured times that cannot be true: they are measured again, and told if that does not help."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

import torch

from ...units import format_seconds
from .group_timing import GroupTimes, Measured

# What fewer rows take over what more rows do, by medians; and a spread.
_MOST_TIMES = 1.5
_MOST_SPREAD = 0.5


@dataclasses.dataclass(frozen=True, order=True)
class _Doubt:
    """A time that is too long, of a kind of group; ``size`` is an index of a number of rows."""

    by: float
    size: int
    like: int
    of: str
    text: str


def measured_twice_if_doubtful(
    measure: Callable[[Sequence[int]], list[Measured]],
    rows: Sequence[int],
    name_of: Callable[[int], str],
) -> list[Measured]:
    """What is measured for each number of rows.

    Where few rows take much longer than more rows do, or repetitions differ by half, the few are
    measured again, and the shorter medians count. What is doubtful then, too, is a UserWarning.

    Args:
        measure: of the numbers of rows with these indices.
        rows: increasing.
        name_of: the layers of a kind of group.
    """
    measured = measure(range(len(rows)))
    again = sorted({doubt.size for doubt in _doubts(rows, measured)})
    for size, other in zip(again, measure(again) if again else (), strict=True):
        measured[size] = _quickest(measured[size], other)
    if found := _doubts(rows, measured):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        worst = max(found)
        warnings.warn(
            f"profile: {worst.of} of {name_of(worst.like)}: {worst.text}{more}, measured twice, "
            f"threads: {torch.get_num_threads()}. Measure on a quiet machine, with "
            "OMP_NUM_THREADS=1 for each process, or with more seconds=",
            stacklevel=5,
        )
    return measured


def _doubts(rows: Sequence[int], measured: Sequence[Measured]) -> list[_Doubt]:
    found = []
    for size, each in enumerate(measured):
        for like, times in each.times.items():
            if times.spread > _MOST_SPREAD:
                text = (
                    f"microbatch_rows: {rows[size]}, "
                    f"quartiles {100 * times.spread:.0f} % of the median apart"
                )
                by = times.spread / _MOST_SPREAD
                found.append(_Doubt(by, size, like, "forward and backward", text))
            for what in ("forward", "backward"):
                least, more_rows = min(
                    (getattr(other.times[like], what), more)
                    for other, more in zip(measured[size:], rows[size:], strict=True)
                )
                taken = getattr(times, what)
                if taken > _MOST_TIMES * least:
                    text = (
                        f"{format_seconds(taken)} with microbatch_rows: {rows[size]}, "
                        f"{format_seconds(least)} with {more_rows}"
                    )
                    by = taken / (_MOST_TIMES * least) if least else math.inf
                    found.append(_Doubt(by, size, like, what, text))
    return found


def _quickest(one: Measured, other: Measured) -> Measured:
    def shorter(like: int) -> GroupTimes:
        both = one.times[like], other.times[like]
        return dataclasses.replace(
            min(both, key=lambda times: times.backward),
            forward=min(times.forward for times in both),
            spread=min(times.spread for times in both),
        )

    return dataclasses.replace(one, times={like: shorter(like) for like in one.times})
