"""How a model is arranged over processes: as options or a plan say."""

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
from ..profiling.prepared import layer_names
from ..ranks.mesh import check_mesh, described
from ..schedules.load import fingerprint, schedule_for
from .options import Options, length_of, what_to_recompute

DEFAULT_SCHEDULE = "2bw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How stages, microbatches and replicas are arranged over processes.

    The attributes are those options of :class:`PipelineModule`; None: it was not given.

    Attributes:
        order: the process of each replica's rank, [replicas][ranks], if it is not the usual one.
    """

    num_stages: int | None
    num_microbatches: int | None
    schedule: str | os.PathLike[str] | Schedule | None
    stages_per_rank: int | None
    split: str | Sequence[str] | None
    width: int | None
    recompute: bool | str | Sequence[bool] | Sequence[str] | None
    mesh: DeviceMesh | None
    order: list[list[int]] | None = None

    @classmethod
    def given(cls, options: Options) -> Arrangement:
        """Takes what was given; ``num_stages="auto"`` counts as not given."""
        num_stages: Any = options.num_stages
        return cls(
            num_stages=None if is_auto(options) else num_stages,
            num_microbatches=options.num_microbatches,
            schedule=options.schedule,
            stages_per_rank=options.stages_per_rank,
            split=options.split,
            width=options.width,
            recompute=options.recompute,
            mesh=options.mesh,
        )

    def complete(self, model: nn.Module | Sequence[nn.Module], plan: Plan | None) -> Arrangement:
        """The plan's arrangement; without a plan this one, with defaults where nothing was given.

        Raises:
            ValueError: there is no number of stages, or what was given is not what the plan says.
            ValueError, TypeError: the mesh does not fit.
        """
        if plan is None:
            return dataclasses.replace(
                self,
                num_stages=length_of(model) if self.num_stages is None else self.num_stages,
                schedule=DEFAULT_SCHEDULE if self.schedule is None else self.schedule,
                stages_per_rank=1 if self.stages_per_rank is None else self.stages_per_rank,
                split="auto" if self.split is None else self.split,
                width=check_mesh(self.mesh, 1 if self.width is None else self.width),
                recompute=False if self.recompute is None else self.recompute,
            )
        self._check_agreement(plan)
        return Arrangement(
            num_stages=plan.num_stages,
            num_microbatches=plan.num_microbatches,
            schedule=plan.schedule,
            stages_per_rank=plan.stages_per_rank,
            split=plan.split,
            width=check_mesh(self.mesh, plan.width),
            recompute=plan.recompute,
            mesh=self.mesh,
            order=order_of(plan) if self.mesh is None else None,
        )

    def _check_agreement(self, plan: Plan) -> None:
        """Raises ValueError if something was given that the plan says differently."""
        for name in ("num_stages", "num_microbatches", "stages_per_rank", "width"):
            given, planned = getattr(self, name), getattr(plan, name)
            if given not in (None, planned):
                raise _contradiction(name, given, planned)
        made = schedule_for(
            plan.schedule, plan.num_stages, plan.num_microbatches, plan.stages_per_rank
        )
        if self.schedule is not None and self.schedule != plan.schedule:
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

    def made(self) -> Schedule:
        """The checked schedule of a complete arrangement."""
        return schedule_for(
            self.schedule or DEFAULT_SCHEDULE,
            self.num_stages,
            self.num_microbatches,
            self.stages_per_rank or 1,
        )

    def settings(self) -> dict[str, Any]:
        """Settings of a complete arrangement that must be equal on all ranks.

        Raises:
            ValueError, TypeError: a schedule of one's own is malformed or illegal.
        """
        schedule: object = self.schedule
        if not isinstance(schedule, str) or "\n" in schedule:
            schedule = fingerprint(self.made())  # the same file may differ between machines
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


def is_auto(options: Options) -> bool:
    """Whether the arrangement is to be planned for the devices at hand."""
    wants = isinstance(options.num_stages, str) and options.num_stages == "auto"
    return wants and options.plan is None


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
