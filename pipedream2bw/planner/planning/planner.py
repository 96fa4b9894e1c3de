"""Choosing width, depth, microbatch, recomputation and schedule (arXiv 2006.09503, section 4)."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _C
from ...errors import DoesNotFit
from ...json_document import given_or_loaded
from ...optimizer.staleness import LITTLE_LATE, Remedy
from ...progress import progress
from ...rules import as_dtype, as_name
from ..profiling.profile import Profile
from .arguments import (
    SCHEDULES,
    PerTrainedByte,
    PlanArguments,
    check_grid,
    check_precision,
    check_update_time,
    memory_of_types,
    own_memories,
)
from .calibration import Calibration
from .cluster import MOST_DEVICES, Cluster, DeviceType, as_cluster
from .plan import RECOMPUTE, Alternative, Plan, StagePlan
from .tensor_parallel import Shards, divided, grouped

_MOST_ALTERNATIVES = 5
_MOST_BEHIND = 3  # microbatches that a stage has forgotten and its device may yet have to read


def plan(
    profile: Profile | str | os.PathLike[str],
    *,
    devices: int | Sequence[DeviceType] | Cluster,
    memory: str | float,
    batch: int,
    largest_batch: int | None = None,
    schedules: str | Sequence[str] = SCHEDULES,
    stages_per_rank: int | Sequence[int] = (2, 4),
    recompute: str | Sequence[str] = RECOMPUTE,
    tensor_parallel: int | Sequence[int] = 1,
    sharded: str | Sequence[str] = (),
    summed: str | Sequence[str] = (),
    objective: str = "throughput",
    slack: float = 0.1,
    num_batches: int | None = None,
    start_within: float = 0.0,
    optimizer: str = "adamw",
    precision: str | None = None,
    split_master: bool = False,
    gradient_dtype: torch.dtype | None = None,
    optimizer_device: str | None = None,
    shard_state: bool = False,
    staleness: Remedy | Sequence[Remedy] = (),
    width: int | None = None,
    num_stages: int | None = None,
    unequal_replicas: bool = True,
    max_late_share: float = LITTLE_LATE,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> Plan:
    """The best way to train the profiled model on some devices.

    Searches every width w, depth d, profiled microbatch size b, schedule and way to recompute
    (arXiv 2006.09503, section 4, Algorithm 1). Layers are put on stages so that the slowest one
    takes the least time. docs/planner.md says how, and what a plan's time is made of.

    >>> plan = pd2.plan(pd2.Profile.load("gpt.json"), devices=8, memory="16GiB", batch=512)
    >>> plan.num_devices, plan.batch
    (8, 512)
    >>> plan.save("plan.json")

    Args:
        profile: of the model, as it will be trained (dtype included), or the path of one.
        devices: how many, or their types, with the profile's links if it has any, else free ones.
            Or a cluster. At most 65,536.
        memory: bytes of a device, a number or like "16GiB", unless its type has its own.
        batch: rows of one batch, of all replicas together: plans have w * b * m of them, at least.
            At most 100 million.
        largest_batch: rows of one batch, at most; the batch if None. The largest that trains well.
        schedules: of "2bw", "2bw_fresh", "2bw_eager", "1f1b", "gpipe", "interleaved",
            "zero_bubble", "chimera", "pipedream". In a V of up to 64 ranks of "2bw_v",
            "2bw_v_two_thirds", "2bw_v_half", "2bw_v_min", "zero_bubble_v", "v_half", "v_min". Of
            these, of ``stages_per_rank`` and of ``recompute`` one may be given by itself.
        stages_per_rank: tried with "interleaved".
        recompute: ways to try: "none", "stages" (all of each stage), "blocks": of every stage only
            the blocks that its memory demands, of those the ones that take the least time. A block
            is a module in a list, like "layers.3".
        tensor_parallel: degrees to try, such as (1, 2, 4): so many adjacent devices share each
            stage. They must divide the devices, and those of a server or the other way round. Each
            must divide one of the sizes of every parameter that is cut.
        sharded, summed: names or patterns (``fnmatch``) of the profile's layers whose parameters
            these devices cut. They add up what those of ``summed`` make (row-parallel). What those
            of ``sharded`` make stays in parts (column-parallel). Layers between work on parts. No
            layer is in both.
        objective: "throughput"; "cost": the lowest price of a batch; "memory": the smallest peak of
            a device, of plans that take at most 1 + slack of the least time.
        slack: see ``objective``.
        num_batches: for prices that change: the batches whose price counts, beginning now. None: at
            today's prices.
        start_within: hours that these batches may wait for low prices; the plan's ``start_hour``
            says when they are to begin.
        optimizer: "sgd", "momentum" or "adamw": its state's bytes, and its time, which a measured
            profile must have; in another one that lacks it an update takes no time.
        precision: "bf16" or "fp16" if the pipeline will have it. The profile then is of the model
            in that dtype (``model.bfloat16()``): those of float32 do not show its times and bytes.
        split_master, gradient_dtype, optimizer_device: as in :class:`PipelineModule`. With
            ``"cpu"`` state takes none of the devices' memory, and an update the time that was
            measured there.
        shard_state: as in :class:`PipelineOptimizer`: each of w replicas has 1/w of a stage's
            masters and optimizer state, and steps that. Not with schedules of two pipelines, which
            are then left out of the default ones.
        staleness: as in :class:`PipelineOptimizer`. A correction keeps a step of each trained
            parameter, under schedules with late forwards: 4 bytes each, of which ``shard_state``
            leaves 1/w. Whole float32 masters of 16-bit weights need none. Times do not change.
        width, num_stages: the number of replicas, and of stages, of every plan; None: the best.
        unequal_replicas: with devices of several speeds, replicas may have different numbers of
            microbatches, as their devices are fast: the plan's num_microbatches is a number for
            each. Not with "chimera". False: all have as many.
        max_late_share: of all forwards, those that may read W(t-1) under "2bw_fresh" with updates
            of one slot. Plans have as many microbatches as that takes (2d for 3/8), or as fit.
        calibration: what :func:`calibrate` learnt from a run, or the path of it: plans leave its
            margin of memory.

    Raises:
        DoesNotFit: the model fits on no plan; its ``limit`` is a memory that would do.
        ValueError: no sizes make such a batch, or an argument is wrong: names it and both values.
        TypeError: an argument is of a wrong type.
    """
    precision, gradient_dtype = as_name(precision), as_dtype(gradient_dtype)
    arguments = PlanArguments.of(locals())
    profile = given_or_loaded("profile", profile, Profile)
    calibration = arguments.calibration
    if calibration is not None:
        profile = calibration.applied_to(profile)
    check_precision(profile, precision)
    check_update_time(profile, arguments.optimizer)
    cluster = as_cluster(devices, profile.links)
    shards = Shards.of(profile, arguments.sharded, arguments.summed)
    blocks = blocks_of([layer.name for layer in profile.layers])
    limits = memory_of_types(cluster, arguments.bytes_per_device, calibration)

    def best_of(degree: int) -> _C.BestPlans:
        groups, rings = grouped(cluster, degree)
        of_degree = profile
        if degree > 1:
            throughput = cluster.types[0].throughput
            of_degree = divided(profile, shards, degree, rings, throughput)
        pieces = 1 + sum(layer.can_cut_after for layer in of_degree.layers)
        check_grid(arguments, groups, num_pieces=pieces)
        options = _C.PlanOptions(
            batch=batch,
            largest_batch=arguments.largest_batch,
            width=width or 0,
            num_stages=num_stages or 0,
            schedules=arguments.schedules,
            stages_per_rank=arguments.chunks,
            recompute=arguments.recompute,
            objective=objective,
            slack=slack,
            num_batches=num_batches or 0,
            start_within=start_within,
            gradient=arguments.held.gradient,
            state=arguments.held.state,
            kept=arguments.held.kept,
            shares_state=shard_state,
            steps_on_host=optimizer_device is not None,
            microbatches_behind=0 if profile.device.type == "cpu" else _MOST_BEHIND,
            unequal_replicas=unequal_replicas,
            max_late_share=max_late_share,
            reserved=0.0 if calibration is None else calibration.offset,
        )
        return _C.best_plans(
            _profiled_model(of_degree, blocks, arguments.optimizer, arguments.held),
            _planned_cluster(groups, limits, None if isinstance(devices, Cluster) else profile),
            options,
        )

    for degree in arguments.degrees:
        grouped(cluster, degree)
        shards.check_parts(profile, degree)
    try:
        with progress("plan"):
            found = _of_degrees(arguments.degrees, best_of)
    except DoesNotFit as error:
        own = own_memories(cluster)
        raise DoesNotFit(f"{error}{own}", limit=error.limit) from None
    degree, bound_by, best, alternatives = _chosen(found, objective)
    stages = tuple(_stage_plan(stage, best, profile, blocks, degree) for stage in best.stages)
    return Plan(
        **{**_fields(Plan, best), "stages": stages},
        tensor_parallel=degree,
        shard_state=shard_state,
        gradient_dtype=None if gradient_dtype is None else str(gradient_dtype).split(".")[1],
        bound_by=bound_by,
        alternatives=alternatives,
        profile_fingerprint=profile.fingerprint,
    )


def _of_degrees(
    degrees: Sequence[int], best_of: Callable[[int], _C.BestPlans]
) -> dict[int, _C.BestPlans]:
    """The plans of every degree of tensor parallelism that has some.

    Raises:
        ValueError: none has: the error of the one that lacks the least memory, or the first one.
    """
    found = {}
    errors: list[ValueError] = []
    for degree in degrees:
        try:
            found[degree] = best_of(degree)
        except ValueError as error:
            errors.append(error)
            if found and not isinstance(error, DoesNotFit):
                warnings.warn(f"tensor_parallel: {degree} has no plan: {error}", stacklevel=3)
    if not found:
        lacking = [error for error in errors if isinstance(error, DoesNotFit)]
        raise min(lacking, key=lambda error: error.limit) if lacking else errors[0]
    return found


def _chosen(
    found: dict[int, _C.BestPlans], objective: str
) -> tuple[int, str, _C.FoundPlan, tuple[Alternative, ...]]:
    """The best degree, what bounds its plan, that plan, and the next best ones.

    These are of the same degree, and the best one of each other.
    """

    def score(plan: _C.FoundPlan) -> float:
        if objective != "cost":
            return 1 / plan.rows_per_second
        return plan.total_price or plan.price_per_hour / plan.rows_per_second

    bests = {degree: plans.plans[0] for degree, plans in found.items()}
    least = min(map(score, bests.values()))
    equal = [degree for degree, plan in bests.items() if score(plan) < least * _C.EQUALLY_GOOD]

    def preference(degree: int) -> tuple[float, float]:
        each = bests[degree]
        outline = Alternative(**_fields(Alternative, each), lost_by="")
        return outline.shape.mean_delay, each.peak_bytes

    chosen = min(equal, key=preference)
    best, *others = found[chosen].plans
    by_score = [
        (
            score(plan),
            Alternative(**_fields(Alternative, plan), tensor_parallel=chosen, lost_by=why),
        )
        for plan, why in zip(others, found[chosen].lost_by, strict=True)
    ]
    more = "more expensive" if objective == "cost" else "slower"
    for degree, plan in bests.items():
        if degree != chosen:
            above = f"{100 * (score(plan) / score(best) - 1):.3g} % {more}"
            why = f"{above if degree not in equal else 'equally good'}; bound by "
            why += _bound_by(found[degree], degree)
            other = Alternative(**_fields(Alternative, plan), tensor_parallel=degree, lost_by=why)
            by_score.append((score(plan), other))
    by_score.sort(key=lambda each: each[0])
    alternatives = tuple(other for _, other in by_score[:_MOST_ALTERNATIVES])
    return chosen, _bound_by(found[chosen], chosen), best, alternatives


def _bound_by(found: _C.BestPlans, degree: int) -> str:
    groups = f"; each device here is {degree} adjacent ones" if degree > 1 else ""
    return f"{found.bound_by}{groups}"


def check_arguments(**arguments: Any) -> None:
    """Raises what :func:`plan` would for its arguments, as far as they do not need the profile.

    A profile may take minutes to measure.
    """
    bound = inspect.signature(plan).bind(None, **arguments)
    bound.apply_defaults()
    checked = PlanArguments.of(bound.arguments)
    cluster = as_cluster(bound.arguments["devices"], None)
    groups = [grouped(cluster, degree)[0] for degree in checked.degrees]
    check_grid(checked, groups[0], num_pieces=MOST_DEVICES)


def _fields(kind: type[Plan | Alternative | StagePlan], *found: object) -> dict[str, Any]:
    """The fields of a dataclass that the engine's structs have under the same names."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        name: getattr(struct, name) for struct in found for name in names if hasattr(struct, name)
    }


def blocks_of(layers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The modules in lists that hold adjacent layers and no others: first layer, and end.

    A layer "decoder.layers.3.mlp.up" is in "decoder.layers.3", up to the first number.
    """
    places: dict[str, list[int]] = {}
    for index, name in enumerate(layers):
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        if numbers and numbers[0] > 0:
            places.setdefault(".".join(parts[: numbers[0] + 1]), []).append(index)
    return {
        name: (held[0], held[-1] + 1)
        for name, held in places.items()
        if len(held) == held[-1] + 1 - held[0]
    }


def _profiled_model(
    profile: Profile, blocks: dict[str, tuple[int, int]], optimizer: str, held: PerTrainedByte
) -> _C.ProfiledModel:
    shared = [
        _shared(
            each.layers,
            trained_bytes=each.trained_bytes,
            frozen_bytes=each.parameter_bytes - each.trained_bytes,
        )
        for each in profile.shared_parameters
    ]
    microbatches = [
        _C.ProfiledRows(
            rows=each.rows,
            layers=[
                _C.LayerCost(
                    forward=each.forward[index],
                    input_grad=each.input_grad[index],
                    weight_grad=each.weight_grad[index],
                    activation_bytes=each.activation_bytes[index],
                    parameter_bytes=layer.parameter_bytes,
                    trained_bytes=layer.trained_bytes,
                )
                for index, layer in enumerate(profile.layers)
            ],
            edges=[
                _C.Edge(producer=producer, consumer=consumer, bytes=size)
                for producer, consumer, size in each.edges
            ],
            shared=[_shared(layers, kept_bytes=size) for size, layers in each.kept] + shared,
        )
        for each in profile.microbatches
    ]
    return _C.ProfiledModel(
        microbatches=microbatches,
        can_cut=[layer.can_cut_after for layer in profile.layers[:-1]],
        blocks=[_C.Block(first=first, end=end) for first, end in blocks.values()],
        # Profiled for each byte of float32.
        seconds_per_update_byte=held.stepped * profile.seconds_per_update_byte.get(optimizer, 0.0),
        seconds_per_action=profile.seconds_per_action,
    )


def _shared(layers: Sequence[int], **bytes_of_kind: float) -> _C.Value:
    """Makes what counts with the first layer, and again on later stages with one of the others."""
    return _C.Value(producer=layers[0], consumers=layers[1:], **bytes_of_kind)


def _planned_cluster(
    cluster: Cluster, limits: Sequence[float], measured: Profile | None
) -> _C.PlannedCluster:
    all_reduce = () if measured is None or measured.links is None else measured.all_reduce
    return _C.PlannedCluster(
        types=[
            _C.PlannedType(
                name=each.name,
                slowness=1 / each.throughput,
                memory_bytes=limit,
                prices=[_C.Price(from_hour=hour, per_hour=price) for hour, price in each.prices()],
            )
            for each, limit in zip(cluster.types, limits, strict=True)
        ],
        type_of=[index for index, each in enumerate(cluster.types) for _ in range(each.count)],
        topology=_topology(cluster),
        all_reduce=[
            _C.AllReduceTime(ranks=ranks, bytes=size, seconds=seconds)
            for ranks, size, seconds in all_reduce
        ],
    )


def _topology(cluster: Cluster) -> _C.Servers | _C.Mesh | _C.LinkMatrix:
    links = [_C.Link(latency=latency, bandwidth=rate) for latency, rate in cluster.links]
    if cluster.topology == "matrix":
        return _C.LinkMatrix(num_devices=cluster.num_devices, links=links)
    if cluster.topology == "mesh":
        rows, columns = cluster.sizes
        return _C.Mesh(rows=rows, columns=columns, row=links[0], column=links[1])
    return _C.Servers(devices_per_server=cluster.sizes[0], inside=links[0], outside=links[1])


def _stage_plan(
    stage: _C.PlannedStage,
    found: _C.FoundPlan,
    profile: Profile,
    blocks: dict[str, tuple[int, int]],
    degree: int,
) -> StagePlan:
    names = list(blocks)
    recomputed: bool | tuple[str, ...] = found.recompute == "stages"
    if found.recompute == "blocks":
        recomputed = tuple(names[block] for block in stage.blocks)
    return StagePlan(
        **{
            **_fields(StagePlan, stage, stage.costs),
            "devices": tuple(group * degree + i for group in stage.devices for i in range(degree)),
            "memory_limit": min(stage.memory_limit, sys.float_info.max),
        },
        begins_at=profile.layers[stage.first].name if stage.first else "",
        layers=(stage.first, stage.end),
        recomputed=recomputed,
    )
