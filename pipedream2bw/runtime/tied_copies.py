"""How the copies of tied parameters stay bitwise equal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import _C
from ..ranks.grid import RankGrid
from ..stages.tied import Tie
from .stage_weights import StageWeights


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
            with contextlib.ExitStack() as shown, torch.no_grad():
                for copy in (first, *others):
                    shown.enter_context(copy.masters_shown(change=True))
                for name in tie.names:
                    mine = first.shown(name)
                    if group is not None:
                        value = mine.contiguous()
                        dist.broadcast(
                            value, group=group, group_src=self._rank_in(group, stages[0])
                        )
                        mine.copy_(value)
                    for other in others:
                        other.shown(name).copy_(mine)
            for copy in (first, *others):
                copy.engine.restart_delay()
