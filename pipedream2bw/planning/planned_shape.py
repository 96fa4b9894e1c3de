"""What a plan's schedule does with its stages, known without making the schedule."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from .. import _C
from ..checks import check_whole_number

MOST_MICROBATCHES = 10**8
"""Of a batch: a schedule has some actions for each of them on every stage."""


MOST = {
    "width": 2**31 - 1,
    "num_stages": 10**6,
    "stages_per_rank": 10**6,
    "microbatch_rows": 2**31 - 1,
    "num_microbatches": MOST_MICROBATCHES,
}
"""The largest sizes that a plan may have."""


class Sizes(Protocol):
    """Of a plan, or of an alternative."""

    @property
    def schedule(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def stages_per_rank(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class PlannedShape:
    """Of a schedule that is not made, since with many microbatches it is long.

    Attributes:
        num_versions: of the weights, at once.
        most_in_flight: by stage, microbatches between forward and backward.
        most_recomputed: by stage, microbatches whose forward has run again and whose backward is
            not done.
        stages_of_ranks: by rank of a replica, the stages that it holds. With two pipelines stage
            d + i is the second one's copy of stage i.
    """

    num_versions: int
    most_in_flight: list[int]
    most_recomputed: list[int]
    stages_of_ranks: list[list[int]]

    @classmethod
    def of(cls, sizes: Sizes) -> PlannedShape:
        """Of sizes within :data:`MOST`.

        Raises:
            ValueError: the planner does not know the schedule, or the schedule has no such sizes.
        """
        if sizes.schedule not in _C.planned_schedules():
            known = ", ".join(_C.planned_schedules())
            raise ValueError(f'schedule: "{sizes.schedule}", plans have one of {known}')
        d, v = sizes.num_stages, sizes.stages_per_rank
        versions, in_flight, recomputed, ranks = _C.planned_shape(
            sizes.schedule, d, sizes.num_microbatches, v
        )
        if len(ranks) * v < sum(map(len, ranks)):  # a second pipeline
            ranks = [[first, d + second] for first, second in ranks]
        return cls(versions, in_flight, recomputed, ranks)


def check_sizes(sizes: object) -> None:
    """Raises ValueError or TypeError unless every size is a number within its limits."""
    for name, most in MOST.items():
        check_whole_number(name, getattr(sizes, name), at_most=most)
    v, m = (getattr(sizes, name) for name in ("stages_per_rank", "num_microbatches"))
    if v * m >= 2**31:
        raise ValueError(
            f"stages_per_rank: {v}, num_microbatches: {m}: their product must be below {2**31}"
        )
