"""What a plan says of itself, compared: its sizes, its schedule's counts, the sums of its parts."""

from __future__ import annotations

from pipedream2bw import _C
from pipedream2bw.planner.planning.plan import (
    Plan,
    StagePlan,
    bytes_of_rank,
    held_always,
    held_in_flight,
)

ROUNDING = 1e-6


def check_plan(plan: Plan) -> None:
    """Raises ValueError that names a field, its value and what it must agree with."""
    numbers = plan.num_microbatches
    total = sum(numbers) if isinstance(numbers, tuple) else plan.width * numbers
    assert plan.batch == plan.microbatch_rows * total
    assert _is_near(plan.rows_per_second, plan.batch / plan.seconds_per_batch)
    assert 0 <= plan.bubble <= 1
    assert len(plan.stages) == plan.num_stages
    assert len(plan.alternatives) <= 5
    _check_layers(plan)
    shape = plan.shape
    _check_devices(plan, shape)
    for index, stage in enumerate(plan.stages):
        known = {
            "num_versions": shape.num_versions[index],
            "most_in_flight": shape.most_in_flight[index],
        }
        _check_stage(f"stages[{index}]", stage, plan.schedule, known, shape.most_recomputed[index])
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


def _check_devices(plan: Plan, shape: _C.PlannedShape) -> None:
    held_by: dict[int, int] = {}
    ranks = {stage: rank for rank, stages in enumerate(shape.stages_of_ranks) for stage in stages}
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if len(stage.devices) != plan.width:
            raise ValueError(
                f"{where}.devices: {len(stage.devices)}, width: {plan.width}: one for each replica"
            )
        for device in stage.devices:
            if held_by.setdefault(device, ranks[index]) != ranks[index]:
                raise ValueError(
                    f"{where}.devices: device {device} has stages of rank {held_by[device]}, "
                    f"{where} is on rank {ranks[index]}: it must have one rank's"
                )


def _check_stage(
    where: str, stage: StagePlan, schedule: str, known: dict[str, int], most_recomputed: int
) -> None:
    """Raises ValueError unless the stage has the schedule's counts and its peak is their sum.

    A plan whose schedule's name was exchanged has other counts.
    """
    for name, count in known.items():
        if (given := getattr(stage, name)) != count:
            raise ValueError(f"{where}.{name}: {given}, with the schedule {schedule}: {count}")
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
        parts += most_recomputed * stage.activation_bytes
    # Of blocks it is not kept what the largest of them takes when it runs again.
    if not _is_near(stage.peak_bytes, parts) and not (
        isinstance(stage.recomputed, tuple) and stage.recomputed and stage.peak_bytes > parts
    ):
        raise ValueError(
            f"{where}.peak_bytes: {stage.peak_bytes}, all of its weights, gradients, state, "
            f"activations and messages together: {parts}: they must be equal"
        )


def _check_peaks(plan: Plan, shape: _C.PlannedShape) -> None:
    most = 0.0
    for rank, stages in enumerate(shape.stages_of_ranks):
        size = sum(bytes_of_rank(plan, stages).values())
        most = max(most, size)
        for stage in stages:
            limit = plan.stages[stage % plan.num_stages].memory_limit
            if size > limit * (1 + ROUNDING):
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
    return abs(value - other) <= ROUNDING * max(value, other)
