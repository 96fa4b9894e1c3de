"""``num_stages="auto"``: profiles the model and plans for the devices at hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from .. import _C
from ..capture.chain import as_root
from ..checks import check_whole_number
from ..model.materialize import home_of
from ..model.precision import Precision
from ..planning.plan import Plan
from ..planning.planner import plan
from ..profiling.links import with_links
from ..profiling.profile import Profile
from ..ranks.agreement import ControlPlane
from ..ranks.grid import join_world
from ..ranks.mesh import check_mesh
from ..schedules.load import make_schedule
from .arrangement import Layout

_SIZES = 3  # numbers of rows that are tried where num_microbatches is not given


def plan_for_devices_at_hand(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    given: Layout,
    *,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    example_target: Any,
    replicated: Sequence[str],
    profile: Profile | str | os.PathLike[str] | None,
    devices: Sequence[torch.device | str] | None,
    precision: str | None,
    split_master: bool,
    timeout: float,
) -> Plan:
    """The fastest plan that uses all processes, or all of ``devices``. Every rank gets the same.

    Args:
        given: num_microbatches and width, which the plan keeps to if they are not None, schedule
            and stages_per_rank.
        example_target: of as many rows as a replica's batch has.
        profile: a path that does not exist is written. Links between these processes that it has
            not are measured, and written there too. It is of the model in the dtypes that its
            stages have.

    Raises:
        ValueError, TypeError: on every rank.
    """
    error: Exception | None = None
    device = torch.device("cpu")
    rows = 0
    dtypes = Precision(nn.Module(), None, False, None, "cpu")
    try:
        root = as_root(model)
        device = home_of(root, (tuple(example_args), dict(example_kwargs or {})))
        dtypes = Precision(root, precision, split_master, None, device.type)
        rows = _check(given, example_target, profile)
    except Exception as raised:
        error = raised
    control = ControlPlane(join_world(device.type), timeout, _C.Fault(), "plan")
    try:
        if error is None and control.size == 1 and not devices:
            error = ValueError(
                f"num_stages: 'auto', devices: {devices}, processes: 1: in one process give "
                "devices=, one for each stage"
            )
        weights = {"precision": precision, "split_master": split_master}
        settings = {
            "num_stages": "auto",
            "rows of example_target": rows,
            **vars_of(given),
            **{name: str(value) for name, value in weights.items()},
        }
        control.agree_on_objects(error, settings)
        ranks = control.size if control.size > 1 else len(devices or ())
        width = _width(given)
        with dtypes.as_in_stages():
            example_args, example_kwargs = dtypes.cast(
                (tuple(example_args), dict(example_kwargs or {}))
            )
            found = _shared(control, lambda: _cached(profile))
            if found is None:
                from ..profiling.profiler import profile as measure  # which measures pipelines

                found = measure(
                    model,
                    loss_fn,
                    example_args=example_args,
                    example_kwargs=example_kwargs,
                    target=example_target,
                    microbatch_rows=_sizes(given, rows, ranks // (width or 1)),
                    replicated=replicated,
                    parallel=ranks if control.size == 1 and device.type == "cpu" else 1,
                    timeout=timeout,
                )
                if isinstance(profile, (str, os.PathLike)):
                    _shared(control, lambda: found.save(profile))
            if control.group is not None and _lacks_links(found, control.size):
                found = with_links(found, control.group, device, timeout)
                if isinstance(profile, (str, os.PathLike)):
                    _shared(control, lambda: found.save(profile))
            _shared(
                control,
                lambda: _check_profile(found, model, example_args, example_kwargs, replicated),
            )
        in_processes = control.size > 1
        made: Plan = _shared(
            control, lambda: _best(found, given, rows, ranks, width, in_processes, weights)
        )
        return made
    finally:
        control.close()


def vars_of(given: Layout) -> dict[str, Any]:
    """For comparing them between ranks, before there is a plan."""
    names = ("num_microbatches", "width", "stages_per_rank")
    return {name: getattr(given, name) for name in names} | {"schedule": str(given.schedule)}


def _check(given: Layout, example_target: Any, profile: object) -> int:
    """The rows of a batch."""
    if not isinstance(given.schedule, str) or "\n" in given.schedule:
        raise ValueError(
            f"schedule: {type(given.schedule).__name__}, num_stages: 'auto': give a schedule's name"
        )
    for name in ("num_microbatches", "width", "stages_per_rank"):
        if getattr(given, name) is not None:
            check_whole_number(name, getattr(given, name))
    if given.split is not None:
        raise ValueError(f"split: {given.split!r}, num_stages: 'auto': the plan says it")
    if not (profile is None or isinstance(profile, (Profile, str, os.PathLike))):
        raise TypeError(f"profile: {type(profile).__name__} given, it must be a Profile or a path")
    tensors = [leaf for leaf in pytree.tree_leaves(example_target) if torch.is_tensor(leaf)]
    if not tensors or not all(tensor.dim() and tensor.shape[0] for tensor in tensors):
        raise ValueError(
            "example_target: no tensor with rows, num_stages: 'auto': the profile needs a batch's "
            "target"
        )
    m = given.num_microbatches or 1
    if tensors[0].shape[0] < m:
        raise ValueError(
            f"example_target: {tensors[0].shape[0]} rows, num_microbatches: {m}: every microbatch "
            "needs one"
        )
    return int(tensors[0].shape[0])


def _width(given: Layout) -> int | None:
    return given.width if given.mesh is None else check_mesh(given.mesh, given.width or 1)


def _sizes(given: Layout, rows: int, most_ranks: int) -> list[int]:
    """The rows of the microbatches that are profiled."""
    if given.num_microbatches is not None:
        return [-(-rows // given.num_microbatches)]
    return sorted({max(1, rows // (most_ranks * 2**k)) for k in range(_SIZES)})


def _cached(profile: Profile | str | os.PathLike[str] | None) -> Profile | None:
    if isinstance(profile, (str, os.PathLike)):
        return Profile.load(profile) if Path(profile).exists() else None
    return profile


def _lacks_links(profile: Profile, num_processes: int) -> bool:
    """Without them messages between processes would seem to be free."""
    return profile.links is None or len(profile.links.latency) < num_processes


def _check_profile(
    found: Profile,
    model: nn.Module | Sequence[nn.Module],
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    replicated: Sequence[str],
) -> None:
    from ..profiling.prepared import layer_names

    names = layer_names(
        model, example_args=example_args, example_kwargs=example_kwargs, replicated=replicated
    )
    found.check_model(model, names)


def _best(
    found: Profile,
    given: Layout,
    rows: int,
    ranks: int,
    width: int | None,
    in_processes: bool,
    weights: Mapping[str, Any],
) -> Plan:
    """Of the widths that use all ranks the one with the most rows per second."""
    if width is not None and width > 1 and not in_processes:
        raise ValueError(f"width: {width}, processes: 1: every replica needs some of its own")
    widths = [width] if width is not None else range(1, ranks + 1 if in_processes else 2)
    plans: list[Plan] = []
    errors: list[ValueError] = []
    v = given.stages_per_rank or 1
    for w in widths:
        if ranks % w:
            continue
        # In one process a device is a stage's.
        d = ranks // w * v if in_processes else ranks
        try:
            plans.append(_with(found, given, rows, w, d, v, ranks, weights))
        except ValueError as error:
            errors.append(error)
    if not plans and not errors:
        raise ValueError(f"width: {width}, processes: {ranks}: every replica needs as many of them")
    if not plans:
        raise errors[0]
    return max(plans, key=lambda each: each.rows_per_second)


def _with(
    found: Profile,
    given: Layout,
    rows: int,
    w: int,
    d: int,
    v: int,
    ranks: int,
    weights: Mapping[str, Any],
) -> Plan:
    sizes = tuple(item.rows for item in found.microbatches)
    if given.num_microbatches is not None:
        make_schedule(str(given.schedule), d, given.num_microbatches, v)  # or the rule is told
        found = _of_rows(found, -(-rows // given.num_microbatches))
        batch = largest = w * found.microbatches[0].rows * given.num_microbatches
    else:
        batch = w * rows
        largest = batch + w * sizes[-1]
    # Ranks on a CPU share its memory.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if found.device.type == "cpu" else 1
    return plan(
        found,
        devices=ranks,
        memory=found.device.memory_bytes // max(1, local),
        batch=batch,
        largest_batch=largest,
        schedules=(str(given.schedule),),
        stages_per_rank=(max(2, v),),  # of schedules that have several at all
        width=w,
        num_stages=d,
        **weights,
    )


def _of_rows(found: Profile, rows: int) -> Profile:
    """The profile of microbatches of so many rows alone."""
    known = {item.rows: item for item in found.microbatches}
    if rows not in known:
        raise ValueError(
            f"profile: microbatches of {sorted(known)} rows, a batch has them of {rows}"
        )
    return dataclasses.replace(found, microbatches=(known[rows],))


def _shared(control: ControlPlane, make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0; what it raises there is raised on every rank."""
    made: list[Any] = [None]
    error: Exception | None = None
    is_first = control.group is None or control.group.rank() == 0
    if is_first:
        try:
            made = [make()]
        except Exception as raised:
            error = raised
    control.agree_on_objects(error, {})
    if control.group is not None:
        dist.broadcast_object_list(made, group=control.group, group_src=0)
    return made[0]
