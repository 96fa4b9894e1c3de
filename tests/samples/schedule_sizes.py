"""Sizes with which each schedule runs, found by asking its own rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pipedream2bw as pd2

TWO_PIPELINES = ("chimera", "chimera_doubled")
V_SHAPED = tuple(name for name in pd2.schedule_names() if "v" in name.split("_"))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a pipeline is given beside the schedule's name."""

    num_stages: int
    num_microbatches: int
    stages_per_rank: int

    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def sizes_for(name: str, num_stages: int) -> list[Sizes]:
    """With one stage a rank, and with several where the schedule takes that.

    The fewest microbatches that the rule allows, and the fewest that are more than the stages. None
    for an odd number of stages where two pipelines, or two stages a rank, need an even one.

    Raises:
        LookupError: no sizes were found; a new rule must be said here.
    """
    if num_stages % 2 and name in (*TWO_PIPELINES, *V_SHAPED):
        return []
    found: list[Sizes] = []
    refusal = ""
    for stages_per_rank in (v for v in range(1, num_stages + 1) if num_stages % v == 0):
        allowed = []
        for m in range(1, 4 * num_stages + 1):
            try:
                pd2.make_schedule(name, num_stages, m, stages_per_rank)
            except ValueError as error:
                refusal = str(error)
            else:
                allowed.append(m)
        more = [m for m in allowed if m > num_stages]
        found += [Sizes(num_stages, m, stages_per_rank) for m in sorted({*allowed[:1], *more[:1]})]
    if not found:
        raise LookupError(f"{name}, num_stages: {num_stages}: no sizes are known: {refusal}")
    return found
