"""Counts of a plan's schedule by stage, known without making the schedule."""

from __future__ import annotations

from typing import Protocol

from .. import _C
from .._C import PlannedShape
from ..checks import check_whole_number

MOST_MICROBATCHES = 10**8
"""The most of a batch: a schedule has some actions for each of them on every stage."""


MOST = {
    "width": 2**31 - 1,
    "num_stages": 10**6,
    "stages_per_rank": 10**6,
    "microbatch_rows": 2**31 - 1,
    "num_microbatches": MOST_MICROBATCHES,
}
"""The largest sizes that a plan may have."""


class Sizes(Protocol):
    """The sizes of a plan, or of an alternative."""

    @property
    def schedule(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def stages_per_rank(self) -> int: ...


def shape_of(sizes: Sizes) -> PlannedShape:
    """Counts what a schedule of these sizes, within :data:`MOST`, has on its stages and ranks.

    The schedule is not made, since with many microbatches it is long.

    Raises:
        ValueError: the planner does not know the schedule, or the schedule has no such sizes.
    """
    if sizes.schedule not in _C.planned_schedules():
        known = ", ".join(_C.planned_schedules())
        raise ValueError(f'schedule: "{sizes.schedule}", plans have one of {known}')
    return _C.planned_shape(
        sizes.schedule, sizes.num_stages, sizes.num_microbatches, sizes.stages_per_rank
    )


def check_sizes(sizes: object) -> None:
    """Raises ValueError or TypeError unless every size is a number within its limits."""
    for name, most in MOST.items():
        check_whole_number(name, getattr(sizes, name), at_most=most)
    v, m = (getattr(sizes, name) for name in ("stages_per_rank", "num_microbatches"))
    if v * m >= 2**31:
        raise ValueError(
            f"stages_per_rank: {v}, num_microbatches: {m}: their product must be below {2**31}"
        )
