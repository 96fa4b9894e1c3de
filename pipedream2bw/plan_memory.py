"""What a plan's stages and devices hold, by kind."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .planned_shape import PlannedShape

if TYPE_CHECKING:
    from .plans import Plan, StagePlan

MEMORY_KINDS = ("weights", "gradients", "optimizer state", "activations")
"""Kept inputs of recomputed stages count as activations."""


def held_always(stage: StagePlan) -> float:
    """Bytes of one copy of a stage, whatever is in flight."""
    weights = stage.num_versions * stage.weight_bytes + stage.frozen_bytes
    return weights + stage.gradient_bytes + stage.state_bytes


def held_in_flight(stage: StagePlan) -> float:
    """Bytes that are kept from forwards to backwards, at most."""
    kept = stage.input_bytes if stage.recomputed is True else stage.activation_bytes
    return stage.most_in_flight * kept


def held_again(stage: StagePlan) -> float:
    """Bytes of what a backward has run again, on top of the rest at the stage's peak."""
    return max(0.0, stage.peak_bytes - held_always(stage) - held_in_flight(stage))


def bytes_of_rank(plan: Plan, stages: Sequence[int]) -> dict[str, float]:
    """By kind, of a device that holds these stages, at its peak.

    One of its stages runs forwards again at a time.
    """
    held = [plan.stages[stage % plan.num_stages] for stage in stages]
    values = (
        sum(each.num_versions * each.weight_bytes + each.frozen_bytes for each in held),
        sum(each.gradient_bytes for each in held),
        sum(each.state_bytes for each in held),
        sum(map(held_in_flight, held)) + max(map(held_again, held)),
    )
    return dict(zip(MEMORY_KINDS, values, strict=True))


def stages_of_ranks(plan: Plan) -> list[list[int]]:
    """By rank of a replica, the stages that it holds; see :class:`PlannedShape`."""
    return PlannedShape.of(plan).stages_of_ranks


def limit_of_rank(plan: Plan, rank: int) -> float:
    """Bytes that its device has; infinite if that was not limited (JSON has no infinity)."""
    limit = plan.stages[rank].memory_limit
    return math.inf if limit == sys.float_info.max else limit
