"""How a model is arranged over processes: as options or a plan say."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._C import Schedule
from ..checks import check_microbatches_of_replicas
from ..errors import reworded
from ..json_document import given_or_loaded
from ..model.fingerprint import describe_parameters, fingerprint_of
from ..model.materialize import Example
from ..model.precision import Precision
from ..planning.plan import Plan
from ..profiling.prepared import layer_names
from ..ranks.mesh import check_mesh, described
from ..schedules.load import fingerprint, schedule_for
from .options import Options, comparable, length_of, what_to_recompute

DEFAULT_SCHEDULE = "2bw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How stages, microbatches and replicas are arranged over processes.

    The attributes are those options of :class:`PipelineModule`, as they were given, by default or
    as the plan says.
    """

    num_stages: int
    num_microbatches: int | tuple[int, ...] | None
    schedule: str | os.PathLike[str] | Schedule
    stages_per_rank: int
    split: str | Sequence[str]
    width: int
    recompute: bool | str | Sequence[bool] | Sequence[str]
    mesh: DeviceMesh | None
    plan: Plan | None

    @classmethod
    def of(cls, options: Options, model: nn.Module | Sequence[nn.Module]) -> Arrangement:
        """The plan's arrangement; without a plan what was given, with defaults for the rest.

        Raises:
            ValueError: there is no number of stages, or what was given is not what the plan says.
            ValueError, TypeError: the mesh does not fit.
        """
        if options.plan is not None:
            plan = given_or_loaded("plan", options.plan, Plan)
            _check_agreement(options, plan)
            return cls(
                num_stages=plan.num_stages,
                num_microbatches=plan.num_microbatches,
                schedule=plan.schedule,
                stages_per_rank=plan.stages_per_rank,
                split=plan.split,
                width=check_mesh(options.mesh, plan.width),
                recompute=plan.recompute,
                mesh=options.mesh,
                plan=plan,
            )
        num_stages: Any = options.num_stages
        width = check_mesh(options.mesh, 1 if options.width is None else options.width)
        return cls(
            num_stages=length_of(model) if num_stages is None else num_stages,
            num_microbatches=_checked_microbatches(options.num_microbatches, width),
            schedule=DEFAULT_SCHEDULE if options.schedule is None else options.schedule,
            stages_per_rank=1 if options.stages_per_rank is None else options.stages_per_rank,
            split="auto" if options.split is None else options.split,
            width=width,
            recompute=False if options.recompute is None else options.recompute,
            mesh=options.mesh,
            plan=None,
        )

    @property
    def order(self) -> list[list[int]] | None:
        """The process of each replica's rank, [replicas][ranks], if it is not the usual one."""
        return None if self.plan is None or self.mesh is not None else order_of(self.plan)

    @property
    def microbatches_of_replicas(self) -> tuple[int, ...]:
        """How many each has, where the rows of all are one batch; empty: each has its own."""
        return self.num_microbatches if isinstance(self.num_microbatches, tuple) else ()

    def schedules(self) -> list[Schedule]:
        """The checked schedule of each replica.

        Raises:
            ValueError, TypeError: a schedule of one's own is malformed or illegal, or the method
                has none of so many microbatches: names the replica, if each has a number.
        """

        def made(num_microbatches: int | None) -> Schedule:
            return schedule_for(
                self.schedule, self.num_stages, num_microbatches, self.stages_per_rank
            )

        if not isinstance(self.num_microbatches, tuple):
            return [made(self.num_microbatches)] * self.width
        of_number: dict[int, Schedule] = {}
        for replica, number in enumerate(self.num_microbatches):
            if number not in of_number:
                try:
                    of_number[number] = made(number)
                except ValueError as error:
                    raise reworded(error, f"replica {replica}: {error}") from error
        return [of_number[number] for number in self.num_microbatches]

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks.

        Raises:
            ValueError, TypeError: a schedule of one's own is malformed or illegal.
        """
        schedule: object = self.schedule
        if not isinstance(schedule, str) or "\n" in schedule:
            schedule = fingerprint(self.schedules()[0])  # the same file may differ between machines
        names = ("num_stages", "num_microbatches", "width", "stages_per_rank", "split", "recompute")
        return {
            **comparable(self, names),
            "mesh": described(self.mesh),
            "order of the plan's devices": str(self.order),
            "schedule": schedule,
        }


def _check_agreement(options: Options, plan: Plan) -> None:
    """Raises ValueError if something was given that the plan says differently."""
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


def _checked_microbatches(given: Any, width: int) -> int | tuple[int, ...] | None:
    """The number of microbatches of every replica, which the schedule checks, or of each."""
    if isinstance(given, (list, tuple)):
        return check_microbatches_of_replicas(given, width)
    number: int | None = given
    return number


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


def check_model(
    plan: Plan,
    root: nn.Module,
    example: Example,
    replicated: Sequence[str],
    precision: Precision,
) -> None:
    """Raises ValueError if the plan was made for another model; says what differs.

    It may be the model as it is, in the dtype of the precision, or as its stages will have it.
    """
    args, kwargs = example
    names = layer_names(root, example_args=args, example_kwargs=kwargs, replicated=replicated)
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
