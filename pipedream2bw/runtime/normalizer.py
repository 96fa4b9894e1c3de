"""What the losses of a batch are divided by, where the caller counts it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _C
from ..checks import check_whole_number
from ..ranks.grid import RankGrid
from ..ranks.operations import Announcement
from .accumulation import BatchPart

_MOST = 2**53
"""So that the sum over a thousand replicas is a 64-bit number, too."""


class Normalizer:
    """Counts what losses are sums over, and adds that up over replicas before a batch.

    Args:
        rule: as the caller of ``PipelineModule`` gave it: whether each train_step is given the
            number; or a function that gives it for a target.
    """

    def __init__(self, rule: bool | Callable[[Any], Any], grid: RankGrid) -> None:
        self._rule = rule
        self._grid = grid
        self._of_batch = 0

    def of(self, targets: Sequence[Any], given: Any) -> int:
        """The number of this replica; -1 where nothing is counted.

        Args:
            targets: the batch's, or those of its microbatches.
            given: by the caller of ``train_step``; None: nothing.

        Raises:
            TypeError, ValueError: there is none, one too many, or it is no whole number.
        """
        if self._rule is True:
            if given is None:
                raise ValueError(
                    "normalizer: None given, the pipeline's is True: train_step(..., normalizer=) "
                    "needs the number that the batch's losses are divided by"
                )
            return _checked("normalizer", given)
        if given is not None:
            raise ValueError(
                f"normalizer: {given!r} given, the pipeline's is {self._rule!r}: only with "
                "normalizer=True train_step is given one"
            )
        if self._rule is False:
            return -1
        counted = [_checked("normalizer(target)", self._rule(target)) for target in targets]
        return _checked("normalizer(target), of all microbatches", sum(counted))

    def weights(
        self, announced: Sequence[Announcement], num_microbatches: int, part: BatchPart | None
    ) -> _C.LossWeights:
        """The weights of this replica's losses, given what all ranks have counted.

        Args:
            part: what the train_step is of its batch; None: it is an evaluation.

        Raises:
            ValueError: on every rank: what they counted does not go together.
        """
        grid = self._grid
        # Of two pipelines the first one evaluates.
        last_stages = range(
            grid.depth - 1, grid.depth if part is None else grid.num_stages, grid.depth
        )
        total = sum(self._of_replica(r, announced, last_stages) for r in range(grid.width))
        if part is not None and part.begins:
            self._of_batch = total
        if total < 0:
            return _C.LossWeights()
        if part is not None and total != self._of_batch:
            raise ValueError(
                f"normalizer: {total} in all replicas, in the batch's first train_step: "
                f"{self._of_batch}: all train_steps of a batch are given the whole batch's"
            )
        if total == 0:
            return _C.LossWeights(factors=[0.0] * num_microbatches)
        return _C.LossWeights(divisor=total)

    def _of_replica(
        self, replica: int, announced: Sequence[Announcement], last_stages: Iterable[int]
    ) -> int:
        grid = self._grid
        first, *others = (
            grid.process_of(stage, replica, shard)
            for stage in last_stages
            for shard in range(grid.num_shards)
        )
        number = announced[first].normalizer
        for other in others:
            if announced[other].normalizer != number:
                raise ValueError(
                    f"normalizer on rank {first}: {number}, on rank {other}: "
                    f"{announced[other].normalizer}: all last stages of a replica are given the "
                    "same batch"
                )
        return number


def _checked(name: str, value: Any) -> int:
    try:
        number = operator.index(value)  # of a tensor, too
    except TypeError:
        raise TypeError(f"{name}: {value!r}, it must be a whole number") from None
    check_whole_number(name, number, at_least=0, at_most=_MOST)
    return number
