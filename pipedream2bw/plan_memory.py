"""What a plan's stages and devices hold, by kind."""

from __future__ import annotations

import math
import sys

from .plans import Plan, StagePlan
from .schedules import make_schedule

MEMORY_KINDS = ("weights", "gradients", "optimizer state", "activations")
"""Kept inputs of recomputed stages count as activations."""


def bytes_by_kind(stage: StagePlan) -> dict[str, float]:
    """Of one copy of a stage at its peak; the sum is ``stage.peak_bytes``."""
    weights = stage.num_versions * stage.weight_bytes + stage.frozen_bytes
    kept = stage.peak_bytes - weights - stage.gradient_bytes - stage.state_bytes
    values = (weights, stage.gradient_bytes, stage.state_bytes, max(0.0, kept))
    return dict(zip(MEMORY_KINDS, values, strict=True))


def stages_of_ranks(plan: Plan) -> list[list[int]]:
    """By rank of a replica, the stages that it holds.

    With two pipelines stage d + i is the second one's copy of stage i.
    """
    made = make_schedule(
        plan.schedule, plan.num_stages, plan.num_microbatches, plan.stages_per_rank
    )
    ranks: list[list[int]] = [[] for _ in range(max(made.placement) + 1)]
    for stage, rank in enumerate(made.placement):
        ranks[rank].append(stage)
    return ranks


def limit_of_rank(plan: Plan, rank: int) -> float:
    """Bytes that its device has; infinite if that was not limited (JSON has no infinity)."""
    limit = plan.stages[rank].memory_limit
    return math.inf if limit == sys.float_info.max else limit
