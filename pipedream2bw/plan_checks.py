"""What must hold in a plan, whether it was made or read from a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .plan_memory import bytes_of_rank, held_always, held_in_flight
from .planned_shape import PlannedShape

if TYPE_CHECKING:
    from .plans import Plan, StagePlan

MOST_ALTERNATIVES = 5
_ROUNDING = 1e-6  # of sums that a file keeps beside their parts


def check_plan(plan: Plan, shape: PlannedShape) -> None:
    """Raises ValueError that names a field, its value and what it must agree with."""
    if re.fullmatch("[0-9a-f]{64}", plan.profile_fingerprint) is None:
        raise ValueError(
            f"profile_fingerprint: {plan.profile_fingerprint!r}, it must be 64 hexadecimal digits"
        )
    if len(plan.alternatives) > MOST_ALTERNATIVES:
        raise ValueError(
            f"alternatives: {len(plan.alternatives)}, there are at most {MOST_ALTERNATIVES}"
        )
    if len(plan.stages) != plan.num_stages:
        raise ValueError(f"stages: {len(plan.stages)}, num_stages: {plan.num_stages}: one for each")
    _check_layers(plan)
    _check_devices(plan, len(shape.stages_of_ranks))
    for index, stage in enumerate(plan.stages):
        _check_stage(f"stages[{index}]", index, stage, plan.schedule, shape)
    _check_peaks(plan, shape)


def _check_layers(plan: Plan) -> None:
    end = 0
    begun: dict[str, int] = {}
    again: dict[str, int] = {}
    whole = {isinstance(stage.recomputed, bool) for stage in plan.stages}
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if stage.layers[0] != end:
            raise ValueError(
                f"{where}.layers: {stage.layers}, the stage before ends at {end}: it must "
                "begin there"
            )
        end = stage.layers[1]
        if (stage.begins_at == "") != (index == 0):
            raise ValueError(
                f"{where}.begins_at: {stage.begins_at!r}, it must be the name of a layer, "
                "and '' for stage 0 alone"
            )
        if (other := begun.setdefault(stage.begins_at, index)) != index:
            raise ValueError(
                f"{where}.begins_at: {stage.begins_at!r}, stages[{other}] begins there: every "
                "stage has a first layer of its own"
            )
        for name in stage.recomputed if isinstance(stage.recomputed, tuple) else ():
            if name in again:
                raise ValueError(
                    f"{where}.recomputed: {name!r}, which stages[{again[name]}].recomputed has: "
                    "every block lies within one stage"
                )
            again[name] = index
        if len(whole) > 1:
            raise ValueError(
                f"{where}.recomputed: {stage.recomputed!r}, all stages must have true or "
                "false, or all have names"
            )


def _check_devices(plan: Plan, num_ranks: int) -> None:
    held_by: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if len(stage.devices) != plan.width:
            raise ValueError(
                f"{where}.devices: {len(stage.devices)}, width: {plan.width}: one for each replica"
            )
        for device in stage.devices:
            if held_by.setdefault(device, index % num_ranks) != index % num_ranks:
                raise ValueError(
                    f"{where}.devices: device {device} has stages of rank {held_by[device]}, "
                    f"{where} is on rank {index % num_ranks}: it must have one rank's"
                )


def _check_stage(
    where: str, index: int, stage: StagePlan, schedule: str, shape: PlannedShape
) -> None:
    """A plan whose schedule's name was exchanged has other versions, or others in flight."""
    for name, known in (
        ("num_versions", shape.num_versions),
        ("most_in_flight", shape.most_in_flight[index]),
    ):
        if (given := getattr(stage, name)) != known:
            raise ValueError(f"{where}.{name}: {given}, with the schedule {schedule}: {known}")
    for name, excluded in (
        ("recompute", not stage.recomputed),
        ("input_bytes", stage.recomputed is not True),
    ):
        if excluded and (given := getattr(stage, name)) != 0:
            raise ValueError(
                f"{where}.{name}: {given}, recomputed: {stage.recomputed!r}: it must be 0"
            )
    parts = held_always(stage) + held_in_flight(stage)
    if stage.recomputed is True:
        parts += shape.most_recomputed[index] * stage.activation_bytes
    # Of blocks it is not kept what the largest of them takes when it runs again.
    if not _is_near(stage.peak_bytes, parts) and not (
        isinstance(stage.recomputed, tuple) and stage.recomputed and stage.peak_bytes > parts
    ):
        raise ValueError(
            f"{where}.peak_bytes: {stage.peak_bytes}, all of its weights, gradients, state and "
            f"activations together: {parts}: they must be equal"
        )


def _check_peaks(plan: Plan, shape: PlannedShape) -> None:
    most = 0.0
    for rank, stages in enumerate(shape.stages_of_ranks):
        size = sum(bytes_of_rank(plan, stages).values())
        most = max(most, size)
        for stage in stages:
            limit = plan.stages[stage % plan.num_stages].memory_limit
            if size > limit * (1 + _ROUNDING):
                raise ValueError(
                    f"stages[{stage % plan.num_stages}].memory_limit: {limit}, peak of rank "
                    f"{rank}, which holds it: {size}: it must fit"
                )
    if not _is_near(plan.peak_bytes, most):
        raise ValueError(
            f"peak_bytes: {plan.peak_bytes}, of the device that holds the most: {most}: they must "
            "be equal"
        )


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= _ROUNDING * max(value, other)
