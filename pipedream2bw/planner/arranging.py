"""What a plan says, as the arrangement of a pipeline: ``plan=`` and ``num_stages="auto"``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured, names_of_layers
from ..json_document import given_or_loaded
from ..model.fingerprint import describe_parameters, fingerprint_of
from ..model.precision import Precision
from ..options import Options
from ..pipeline.arrangement import Arrangement, what_to_recompute
from ..ranks.agreement import ControlPlane
from ..ranks.mesh import check_mesh
from ..schedules.load import fingerprint, schedule_for
from .auto_plan import plan_for_devices_at_hand
from .planning.plan import Plan


def arrange_as_planned(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    options: Options,
    control: ControlPlane,
) -> Callable[[], Arrangement]:
    """Makes the plan if there is none; gives what checks it and arranges the model by it.

    Every rank calls this, and then what it gives.

    Raises:
        ValueError, TypeError: on every rank: there can be no plan.
    """
    if options.plan is not None:
        return functools.partial(arrangement_of, options, options.plan)
    plan = plan_for_devices_at_hand(model, loss_fn, options, control)
    return functools.partial(arrangement_of, dataclasses.replace(options, num_stages=None), plan)


def arrangement_of(options: Options, given: Any) -> Arrangement:
    """The arrangement of a plan, or of the file of one.

    Raises:
        ValueError: what was given besides is not what the plan says.
        ValueError, TypeError: the mesh does not fit.
    """
    plan = given_or_loaded("plan", given, Plan)
    _check_agreement(options, plan)
    return Arrangement(
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        split=plan.split,
        width=check_mesh(options.mesh, plan.width),
        recompute=plan.recompute,
        mesh=options.mesh,
        order=order_of(plan) if options.mesh is None else None,
        check_layers=functools.partial(check_layers, plan),
    )


def _check_agreement(options: Options, plan: Plan) -> None:
    """Raises ValueError if something was given that the plan says differently."""
    if plan.tensor_parallel > 1:
        raise ValueError(
            f"tensor_parallel of the plan: {plan.tensor_parallel}, plan=: it opens plans of 1. Cut "
            'the modules over the mesh\'s "tp" (parallelize_module, use_local_shards), and give '
            f"**plan.options: mesh={plan.mesh}, ..."
        )
    for name in ("num_stages", "num_microbatches", "stages_per_rank", "width"):
        given, planned = getattr(options, name), getattr(plan, name)
        given = tuple(given) if isinstance(given, list) else given
        if given not in (None, planned):
            raise _contradiction(name, given, planned)
    made = schedule_for(
        plan.schedule, plan.num_stages, plan.most_microbatches, plan.stages_per_rank
    )
    if options.schedule is not None and options.schedule != plan.schedule:
        if isinstance(options.schedule, str) and "\n" not in options.schedule:
            raise _contradiction("schedule", options.schedule, plan.schedule)
        own = schedule_for(options.schedule, None, None)
        if str(own) != str(made):
            raise _contradiction("schedule", fingerprint(own), fingerprint(made))
    if options.split is not None and (
        isinstance(options.split, str) or list(options.split) != plan.split
    ):
        raise _contradiction("split", options.split, plan.split)
    if options.recompute is not None and (
        what_to_recompute(options.recompute, made) != what_to_recompute(plan.recompute, made)
    ):
        raise _contradiction("recompute", options.recompute, plan.recompute)
    size = check_mesh(options.mesh, 1)
    if options.mesh is not None and size != plan.width:
        raise ValueError(
            f"'dp' of the mesh: {size}, width of the plan: {plan.width}: they must be equal"
        )


def order_of(plan: Plan) -> list[list[int]] | None:
    """The process of each replica's rank; None if the ranks of a replica are adjacent.

    The device with the lowest number that the plan uses is process 0, the next one process 1.
    """
    ranks = plan.stages[: plan.num_stages // plan.stages_per_rank]
    used = sorted({device for stage in ranks for device in stage.devices})
    order = [
        [used.index(stage.devices[replica]) for stage in ranks] for replica in range(plan.width)
    ]
    usual = [process for each in order for process in each] == list(range(len(used)))
    return None if usual else order


def _contradiction(name: str, given: object, planned: object) -> ValueError:
    return ValueError(f"{name}: {given!r}, of the plan: {planned!r}: leave out {name}")


def check_layers(plan: Plan, captured: Captured, *, root: nn.Module, precision: Precision) -> None:
    """Raises ValueError if the plan was made for another model; says what differs.

    It may be the model as it is, in the dtype of the precision, or as its stages will have it.
    """
    names = names_of_layers(captured)
    planned = plan.stages[-1].layers[1]
    if len(names) != planned:
        raise ValueError(
            f"plan of another model: it has {planned} layers, {type(root).__name__} has "
            f"{len(names)}"
        )
    for index, stage in enumerate(plan.stages):
        if index > 0 and names[stage.layers[0]] != stage.begins_at:
            raise ValueError(
                f"plan of another model: stage {index} begins at layer {stage.layers[0]}, which is "
                f"{stage.begins_at!r} in the plan and {names[stage.layers[0]]!r} in "
                f"{type(root).__name__}"
            )
    found = fingerprint_of(describe_parameters(root), names)
    others = [
        fingerprint_of(describe_parameters(root, dtype_of), names)
        for dtype_of in (precision.of_parameter, precision.of_converted)
    ]
    if plan.profile_fingerprint not in (found, *others):
        raise ValueError(
            f"plan of another model: the names, shapes or dtypes of its parameters or layers "
            f"differ from those of {type(root).__name__}: fingerprint "
            f"{plan.profile_fingerprint[:12]}, the model's: {found[:12]}"
        )
