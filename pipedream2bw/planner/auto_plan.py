"""``num_stages="auto"``: profiles the model and plans for the devices at hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _C
from ..capture.chain import as_root
from ..checks import check_whole_number
from ..model.materialize import Example, home_of
from ..model.precision import Precision
from ..model.trees import tensors_in
from ..options import EXCLUSIONS, PLANNED_EXCLUSIONS, Options
from ..pipeline.arrangement import DEFAULT_SCHEDULE
from ..ranks.agreement import ControlPlane
from ..ranks.mesh import check_mesh, described
from ..rules import among, check_values, instance, refuse, settings
from ..schedules.load import make_schedule
from .planning.plan import Plan
from .planning.planner import plan
from .profiling.links import with_links
from .profiling.prepared import Subject
from .profiling.profile import Profile
from .profiling.profiler import profile_together

_SIZES = 3  # numbers of rows that are tried where num_microbatches is not given


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """The model, batch and processes that the plan is for.

    Attributes:
        root: the model as one module.
        device: where the model is.
        rows: of a replica's batch.
        num_microbatches: of a replica's batch, if it was given.
        width: of all plans, if it was given.
        num_processes: that there are; with one, every stage has one of ``devices``.
    """

    root: nn.Module
    example: Example
    device: torch.device
    precision: Precision
    rows: int
    num_microbatches: int | None
    width: int | None
    num_processes: int
    options: Options

    @property
    def num_devices(self) -> int:
        """Processes, or in one process devices, which the plan uses all."""
        in_process = len(self.options.devices or ())
        return self.num_processes if self.num_processes > 1 else in_process

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return str(self.options.schedule or DEFAULT_SCHEDULE)


def plan_for_devices_at_hand(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    options: Options,
    control: ControlPlane,
) -> Plan:
    """The fastest plan that uses all processes, or all of ``devices``. Every rank gets the same.

    It keeps to num_microbatches and width where they are given, to schedule and stages_per_rank.
    Without a schedule a plan of one stage is 1f1b's, unless 2bw is faster.
    If ``profile`` is a path that does not exist, what is measured is saved there; so are links
    between these processes that it lacks. It is of the model in the dtypes that its stages have.

    Raises:
        ValueError, TypeError: on every rank.
    """
    job = control.together(lambda: _checked(model, options, control.size), same=_settings(options))
    with job.precision.as_in_stages():
        found = _profile(job, loss_fn, control)
    return control.from_first(lambda: _best(found, job))


def _checked(model: nn.Module | Sequence[nn.Module], options: Options, num_processes: int) -> _Job:
    _check(options, num_processes)
    root = as_root(model)
    example = (tuple(options.example_args), dict(options.example_kwargs or {}))
    device = home_of(root, example)
    precision = Precision(root, dataclasses.replace(options, autocast=None), device.type)
    width = options.width
    return _Job(
        root=root,
        example=precision.cast(example),
        device=device,
        precision=precision,
        rows=_rows(options.example_target) or 0,
        # One, as was checked; "pipedream" has no others than 1.
        num_microbatches=vars(options)["num_microbatches"]
        or (1 if options.schedule == "pipedream" else None),
        width=width if options.mesh is None else check_mesh(options.mesh, width or 1),
        num_processes=num_processes,
        options=options,
    )


def _settings(options: Options) -> dict[str, Any]:
    return {
        "rows of example_target": _rows(options.example_target),
        **settings(options),
        "mesh": described(options.mesh),
        "schedule": str(options.schedule or DEFAULT_SCHEDULE),
    }


def _rows(target: Any) -> int | None:
    """The rows of a batch; None if a tensor has none, or there is no tensor."""
    tensors = tensors_in(target)
    if not tensors or not all(tensor.dim() and tensor.shape[0] for tensor in tensors):
        return None
    return int(tensors[0].shape[0])


def _check(options: Options, num_processes: int) -> None:
    """Raises ValueError or TypeError if there is something that no plan is made for."""
    given = vars(options)
    check_values(Options, given)
    refuse(PLANNED_EXCLUSIONS, {**given, "processes": num_processes})
    refuse(among(EXCLUSIONS, ("precision", "split_master", "gradient_dtype")), given)
    for name in ("width", "stages_per_rank", "num_microbatches"):
        if given[name] is not None:
            check_whole_number(name, given[name])
    known = (Profile, str, os.PathLike, type(None))
    instance("a Profile or a path", *known).check("profile", options.profile)
    rows = _rows(options.example_target)
    if rows is None:
        raise ValueError(
            "example_target: no tensor with rows, num_stages: 'auto': the profile needs a batch's "
            "target"
        )
    m = given["num_microbatches"] or 1
    if rows < m:
        raise ValueError(
            f"example_target: {rows} rows, num_microbatches: {m}: every microbatch needs one"
        )


# ---------------------------------------------------------------- the profile


def _profile(
    job: _Job, loss_fn: Callable[[Any, Any], torch.Tensor], control: ControlPlane
) -> Profile:
    """The given profile, or a measured one, with links between all processes."""
    options: Any = job.options
    path = options.profile
    args, kwargs = job.example
    found: Profile | None = control.from_first(lambda: _given(path))
    if found is None:
        shares_cores = control.size == 1 and job.device.type == "cpu"
        found = _saved(
            profile_together(
                control,
                Subject(
                    model=job.root,
                    loss_fn=loss_fn,
                    example_args=args,
                    example_kwargs=kwargs,
                    target=options.example_target,
                    microbatch_rows=_sizes(job),
                    replicated=options.replicated,
                ),
                parallel=job.num_devices if shares_cores else 1,
            ),
            path,
            control,
        )
    # Without links, messages between some processes would seem to be free.
    links = found.links
    if control.group is not None and (links is None or len(links.latency) < control.size):
        found = _saved(
            with_links(found, control.group, job.device, control.deadline), path, control
        )
    checked = found
    # The plan's fingerprint tells whether the layers are the same, once the model is captured.
    control.from_first(lambda: checked.check_model(job.root))
    return found


def _given(profile: Profile | str | os.PathLike[str] | None) -> Profile | None:
    if isinstance(profile, (str, os.PathLike)):
        return Profile.load(profile) if Path(profile).exists() else None
    return profile


def _saved(found: Profile, place: object, control: ControlPlane) -> Profile:
    """The profile, saved where a path was given."""
    if isinstance(place, (str, os.PathLike)):
        control.from_first(lambda: found.save(place))
    return found


def _sizes(job: _Job) -> list[int]:
    """The rows of the microbatches that are profiled."""
    if job.num_microbatches is not None:
        return [-(-job.rows // job.num_microbatches)]
    most_ranks = job.num_devices // (job.width or 1)
    return sorted({max(1, job.rows // (most_ranks * 2**k)) for k in range(_SIZES)})


# ---------------------------------------------------------------- the plan


def _best(found: Profile, job: _Job) -> Plan:
    """The plan with the most rows per second, over the widths that use all devices.

    Of those that are equally fast the one with the least delay, then with the smallest peak.
    """
    width, devices = job.width, job.num_devices
    in_processes = job.num_processes > 1
    if width is not None and width > 1 and not in_processes:
        raise ValueError(f"width: {width}, processes: 1: run under torchrun")
    widths = [width] if width is not None else range(1, devices + 1 if in_processes else 2)
    plans: list[Plan] = []
    errors: list[ValueError] = []
    for w in widths:
        if devices % w:
            continue
        # In one process a device is a stage's.
        v = (job.options.stages_per_rank or 1) if in_processes else 1
        try:
            plans.append(_of_width(found, job, w, devices // w * v))
        except ValueError as error:
            errors.append(error)
    if not plans and not errors:
        raise ValueError(
            f"width: {width}, processes: {devices}: the width must divide the number of processes"
        )
    if not plans:
        raise errors[0]
    most = max(each.rows_per_second for each in plans)
    equal = [each for each in plans if each.rows_per_second * _C.EQUALLY_GOOD > most]
    return min(equal, key=lambda each: (each.shape.mean_delay, each.peak_bytes))


def _of_width(found: Profile, job: _Job, width: int, num_stages: int) -> Plan:
    options, devices = job.options, job.num_devices
    v = options.stages_per_rank or 1
    sizes = tuple(item.rows for item in found.microbatches)
    m = job.num_microbatches
    if m is not None:
        make_schedule(job.schedule, num_stages, m, v)  # raises the schedule's rule
        found = _of_rows(found, -(-job.rows // m))
        batch = largest = width * found.microbatches[0].rows * m
    else:
        batch = width * job.rows
        largest = batch + width * sizes[-1]
    # Ranks on a CPU share its memory.
    on_cpu = found.device.type == "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", devices)) if on_cpu else 1
    on_host = options.optimizer_device
    # One stage trains without a delay if that is as fast and nothing asks for one.
    may_have_none = num_stages == 1 and options.schedule is None and options.update_slots is None
    return plan(
        found,
        devices=devices,
        memory=found.device.memory_bytes // max(1, local),
        batch=batch,
        largest_batch=largest,
        schedules=(job.schedule, "1f1b") if may_have_none else (job.schedule,),
        stages_per_rank=(max(2, v),),  # of schedules that have several at all
        width=width,
        num_stages=num_stages,
        max_late_share=1.0,  # the sizes are the caller's
        precision=options.precision,
        split_master=options.split_master,
        gradient_dtype=options.gradient_dtype,
        optimizer_device=None if on_host is None else str(on_host),
    )


def _of_rows(found: Profile, rows: int) -> Profile:
    """The profile of microbatches of that many rows alone."""
    known = {item.rows: item for item in found.microbatches}
    if rows not in known:
        raise ValueError(
            f"profile: microbatches of {sorted(known)} rows, the batch's: {rows}. Profile these"
        )
    return dataclasses.replace(found, microbatches=(known[rows],))
