"""How a model is laid out over processes: given one by one, or as a plan says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._C import Schedule
from ..model.fingerprint import describe_parameters, fingerprint_of
from ..model.materialize import Example
from ..model.precision import Precision
from ..planning.plan import Plan
from ..ranks.mesh import check_mesh, described
from ..schedules.load import fingerprint, schedule_for
from .options import length_of, what_to_recompute

# A string of its own: by its identity it is told from a "2bw" that the caller gives.
DEFAULT_SCHEDULE = "".join(("2", "bw"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """What ``PipelineModule`` takes under these names.

    None, and of the schedule ``DEFAULT_SCHEDULE``: not given.

    Attributes:
        order: the process of each replica's rank, [replicas][ranks], if it is not the usual one.
    """

    num_stages: int | None
    num_microbatches: int | None
    schedule: str | os.PathLike[str] | Schedule
    stages_per_rank: int | None
    split: str | Sequence[str] | None
    width: int | None
    recompute: bool | str | Sequence[bool] | Sequence[str] | None
    mesh: DeviceMesh | None
    order: list[list[int]] | None = None

    def complete(self, model: nn.Module | Sequence[nn.Module], plan: Plan | None) -> Layout:
        """The plan's, or with the defaults where nothing was given.

        Raises:
            ValueError: there is no number of stages.
        """
        if plan is None:
            return dataclasses.replace(
                self,
                num_stages=length_of(model) if self.num_stages is None else self.num_stages,
                stages_per_rank=1 if self.stages_per_rank is None else self.stages_per_rank,
                split="auto" if self.split is None else self.split,
                width=1 if self.width is None else self.width,
                recompute=False if self.recompute is None else self.recompute,
            )
        return Layout(
            plan.num_stages,
            plan.num_microbatches,
            plan.schedule,
            plan.stages_per_rank,
            plan.split,
            plan.width,
            plan.recompute,
            self.mesh,
            order_of(plan) if self.mesh is None else None,
        )

    def check_agreement(self, plan: Plan) -> None:
        """Raises ValueError if something was given that the plan says differently."""
        for name in ("num_stages", "num_microbatches", "stages_per_rank", "width"):
            given, planned = getattr(self, name), getattr(plan, name)
            if given not in (None, planned):
                raise _contradiction(name, given, planned)
        made = schedule_for(
            plan.schedule, plan.num_stages, plan.num_microbatches, plan.stages_per_rank
        )
        if self.schedule is not DEFAULT_SCHEDULE and self.schedule != plan.schedule:
            if isinstance(self.schedule, str) and "\n" not in self.schedule:
                raise _contradiction("schedule", self.schedule, plan.schedule)
            own = schedule_for(self.schedule, None, None)
            if str(own) != str(made):
                raise _contradiction("schedule", fingerprint(own), fingerprint(made))
        if self.split is not None and (
            isinstance(self.split, str) or list(self.split) != plan.split
        ):
            raise _contradiction("split", self.split, plan.split)
        if self.recompute is not None and (
            what_to_recompute(self.recompute, made) != what_to_recompute(plan.recompute, made)
        ):
            raise _contradiction("recompute", self.recompute, plan.recompute)
        size = check_mesh(self.mesh, 1)
        if self.mesh is not None and size != plan.width:
            raise ValueError(
                f"'dp' of the mesh: {size}, width of the plan: {plan.width}: they must be equal"
            )

    def on_mesh(self) -> Layout:
        """With the mesh's width.

        Raises:
            ValueError, TypeError: the mesh does not fit.
        """
        return dataclasses.replace(
            self, width=check_mesh(self.mesh, 1 if self.width is None else self.width)
        )

    def made(self) -> Schedule:
        """The checked schedule, once the layout is complete."""
        return schedule_for(
            self.schedule, self.num_stages, self.num_microbatches, self.stages_per_rank or 1
        )

    def settings(self) -> dict[str, Any]:
        """For comparing them between ranks; none if there is no plan to be compared."""
        if self.stages_per_rank is None:
            return {}
        schedule: object = self.schedule
        if not isinstance(schedule, str) or "\n" in schedule:
            try:  # the same file may differ between machines
                schedule = fingerprint(self.made())
            except Exception:  # which is raised anyway
                schedule = None
        return {
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "width": self.width,
            "mesh": described(self.mesh),
            "stages_per_rank": self.stages_per_rank,
            "split": str(self.split),
            "recompute": str(self.recompute),
            "order of the plan's devices": str(self.order),
            "schedule": schedule,
        }


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
    from ..profiling.prepared import layer_names  # which measures pipelines

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
