"""Tied weights: parameters that several stages hold, whose copies stay bitwise equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..model.local_shards import parameter_at
from ..ranks.grid import RankGrid
from ..ranks.groups import broadcast
from ..stages.program import StageProgram
from .stage_values import masters_shown
from .stage_weights import StageWeights


@dataclasses.dataclass(frozen=True)
class Tie:
    """Parameters that the same stages of the model hold.

    Stages are in ascending order: the first one's copy counts as the parameter.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]


def find_ties(programs: Sequence[StageProgram]) -> list[Tie]:
    """Finds the parameters that layers of several stages use, frozen ones too."""
    stages: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for name in program.parameters:
            stages[name] = (*stages.get(name, ()), program.index)
    names: dict[tuple[int, ...], list[str]] = {}
    for name, holders in stages.items():
        if len(holders) > 1:
            names.setdefault(holders, []).append(name)
    return [Tie(holders, tuple(names[holders])) for holders in sorted(names)]


def is_trained(tie: Tie, model: nn.Module) -> bool:
    """Whether any of a tie's parameters is."""
    return any(parameter_at(model, name).requires_grad for name in tie.names)


def check_ties(schedule: _C.Schedule, ties: Sequence[Tie], model: nn.Module) -> None:
    """Raises ValueError if stages with a common trained parameter would deadlock."""
    copies = range(0, schedule.num_stages, schedule.depth)
    joint = []
    described = []
    for tie in ties:
        trained = [name for name in tie.names if parameter_at(model, name).requires_grad]
        if trained:
            joint.append([first + stage for first in copies for stage in tie.stages])
            described.append(f"{trained[0]} (stages {', '.join(map(str, tie.stages))})")
    if joint:
        schedule.check_joint_updates(
            joint,
            f"tied parameters, {', '.join(described)}, need the gradients of batch t of all their "
            "stages before any of these reads version t + 1; a split that puts all uses into one "
            "stage does not",
        )


class TiedCopies:
    """Keeps the copies of tied parameters bitwise equal.

    Every update begins with the sum of the copies' gradients, in the order of the stages, and so
    makes the same of all copies. Of two pipelines each has copies of its own, with sums that their
    stages' copies have already added up. All processes make it, with the same ties.
    """

    def __init__(
        self, ties: Sequence[Tie], grid: RankGrid, weights: Sequence[StageWeights]
    ) -> None:
        self._grid = grid
        self._held: list[tuple[Tie, tuple[int, ...], list[StageWeights]]] = []
        for first in range(0, grid.num_stages, grid.depth):
            for tie in ties:
                stages = tuple(first + stage for stage in tie.stages)
                grid.make_group(stages)
                here = [each for each in weights if each.index in stages]
                if here:
                    self._held.append((tie, stages, here))
                    self._add_up(tie, stages, here)
        self.take_over()

    def _add_up(self, tie: Tie, stages: tuple[int, ...], here: Sequence[StageWeights]) -> None:
        names = [name for name in tie.names if name in here[0].trainable]
        if not names:
            return
        group = self._grid.group_of(stages)
        total = _C.TiedSum(
            processes=[self._rank_in(group, stage) for stage in stages],
            group="" if group is None else group.group_name,
        )
        for copy in here:
            position = {name: i for i, name in enumerate(copy.trainable)}
            copy.engine.tie(total, stages.index(copy.index), [position[name] for name in names])

    def _rank_in(self, group: dist.ProcessGroup | None, stage: int) -> int:
        return 0 if group is None else dist.get_group_rank(group, self._grid.process_of(stage))

    def take_over(self) -> None:
        """Gives all copies the values of the first stage's. All processes call it, drained."""
        for tie, stages, (first, *others) in self._held:
            group = self._grid.group_of(stages)
            with masters_shown((first, *others), change=True, whole=True), torch.no_grad():
                for name in tie.names:
                    mine = first.shown(name)
                    if group is not None:
                        value = mine.cpu().contiguous()  # as the group joins hosts
                        source = self._rank_in(group, stages[0])
                        broadcast(value, group, source, self._grid.deadline)
                        mine.copy_(value)
                    for other in others:
                        other.shown(name).copy_(mine)
            for copy in (first, *others):
                copy.engine.restart_delay()
