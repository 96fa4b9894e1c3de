"""How a model is arranged over processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .._C import Schedule, schedule_methods
from ..checks import check_microbatches_of_replicas
from ..errors import reworded
from ..options import Options
from ..ranks.mesh import Mesh, check_mesh, described
from ..rules import comparable
from ..schedules.load import fingerprint, schedule_for

DEFAULT_SCHEDULE = "2bw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How stages, microbatches and replicas are arranged over processes.

    Attributes:
        order: the process of each replica's rank, [replicas][ranks], if it is not the usual one.
        check_layers: is called with what was captured, ``root=`` and ``precision=``; refuses
            another model than it was made for. None: it fits every model.

    The other attributes are options of :class:`PipelineModule`, as they were given, by default or
    as a plan says.
    """

    num_stages: int
    num_microbatches: int | tuple[int, ...] | None
    schedule: str | os.PathLike[str] | Schedule
    stages_per_rank: int
    split: str | Sequence[str]
    width: int
    recompute: bool | str | Sequence[bool] | Sequence[str]
    mesh: Mesh | None
    order: list[list[int]] | None = None
    check_layers: Callable[..., None] | None = None

    @classmethod
    def of(cls, options: Options, model: nn.Module | Sequence[nn.Module]) -> Arrangement:
        """What was given, with defaults for the rest.

        Raises:
            ValueError: there is no number of stages.
            ValueError, TypeError: the mesh does not fit.
        """
        num_stages: Any = options.num_stages
        num_microbatches: Any = options.num_microbatches
        width = check_mesh(options.mesh, 1 if options.width is None else options.width)
        if isinstance(num_microbatches, (list, tuple)):  # else the schedule checks the number
            num_microbatches = check_microbatches_of_replicas(num_microbatches, width)
        return cls(
            num_stages=_length_of(model) if num_stages is None else num_stages,
            num_microbatches=num_microbatches,
            schedule=DEFAULT_SCHEDULE if options.schedule is None else options.schedule,
            stages_per_rank=1 if options.stages_per_rank is None else options.stages_per_rank,
            split="auto" if options.split is None else options.split,
            width=width,
            recompute=False if options.recompute is None else options.recompute,
            mesh=options.mesh,
        )

    @property
    def microbatches_of_replicas(self) -> tuple[int, ...]:
        """How many each has, where the rows of all are one batch; empty: each has its own."""
        return self.num_microbatches if isinstance(self.num_microbatches, tuple) else ()

    @property
    def is_fresh(self) -> bool:
        """Whether the schedule is a name of those of which some forwards alone are late."""
        return any(each.is_fresh and each.name == self.schedule for each in schedule_methods())

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
        """Settings that must be equal on all ranks; raises as :meth:`schedules`."""
        schedule: object = self.schedule
        if not isinstance(schedule, str) or "\n" in schedule:
            schedule = fingerprint(self.schedules()[0])  # the same file may differ between machines
        names = ("num_stages", "num_microbatches", "width", "stages_per_rank", "split", "recompute")
        return {
            **{name: comparable(getattr(self, name)) for name in names},
            "mesh": described(self.mesh),
            "order of the plan's devices": str(self.order),
            "schedule": schedule,
        }


def _length_of(model: Any) -> int:
    """The number of stages of a list of modules, for which num_stages may be left out."""
    if not isinstance(model, (list, tuple, nn.ModuleList)):
        raise ValueError("num_stages is missing: it may be left out for a list of modules")
    return len(model)


def what_to_recompute(recompute: object, schedule: Schedule) -> tuple[list[bool], tuple[str, ...]]:
    """Whether each stage recomputes its activations, and the blocks that do so by themselves.

    Raises:
        TypeError, ValueError: it is neither a bool, "auto", one bool for each stage nor names.
    """
    d = schedule.depth
    if isinstance(recompute, bool):
        return [recompute] * d, ()
    if recompute == "auto":
        copies = [range(stage, schedule.num_stages, d) for stage in range(d)]
        return [any(schedule.max_in_flight(copy) > 1 for copy in each) for each in copies], ()
    if isinstance(recompute, str):
        raise ValueError(
            f"recompute: {recompute!r}, known: True, False, 'auto'. Give names of modules as a list"
        )
    items: list[Any] = list(recompute) if isinstance(recompute, Sequence) else [None]
    if items and all(isinstance(item, str) for item in items):
        return [False] * d, tuple(items)
    if not all(isinstance(item, bool) for item in items):
        raise TypeError(
            f"recompute: {recompute!r} given, it must be a bool, 'auto', one bool for each stage "
            "or names of modules"
        )
    if len(items) != d:
        raise ValueError(f"recompute: {len(items)} given, num_stages: {d}: give one a stage")
    return items, ()
