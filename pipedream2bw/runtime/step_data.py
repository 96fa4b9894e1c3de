"""What a train_step or an evaluation is given, and what that is split into."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import _C
from ..ranks.operations import Announcement
from ..rules import instance
from .accumulation import BatchPart
from .microbatch import Microbatch, SplitTree

_PARTS = instance("a list of Microbatch", Iterable)
_PART = instance("a Microbatch", Microbatch)


class Listed(NamedTuple):
    """What a rank knows of ready-made microbatches, in their order; empty: nothing."""

    rows: tuple[int, ...] = ()  # of the arguments
    shapes: tuple[int, ...] = ()  # hashes of the arguments' other dimensions
    target_rows: tuple[int, ...] = ()  # -1: a target has no rows


@dataclasses.dataclass(kw_only=True)
class StepData:
    """A train_step's or an evaluation's data on this rank: checked, not yet split.

    Its parts are a batch, which is to be split, or ready-made microbatches.
    """

    part: BatchPart | None  # what the train_step is of its batch; None: it is an evaluation
    # What the other ranks need to know of it.
    announcement: Announcement = dataclasses.field(default_factory=Announcement)
    listed: Listed | None = None  # of ready-made microbatches
    values: list[list[Any]] = dataclasses.field(default_factory=list)  # stage 0: by part
    whole: list[bool] = dataclasses.field(default_factory=list)
    targets: list[SplitTree] = dataclasses.field(default_factory=list)  # last stage: by part

    @property
    def training(self) -> bool:
        return self.part is not None


class Microbatches(NamedTuple):
    """A replica's microbatches, the same on all its ranks.

    Where a batch has fewer than the schedule, those of each pipeline that are missing are its last
    ones.

    Attributes:
        sizes: rows of each; 0: it is missing.
        layouts: numbers of equal shapes; -1: it is missing.
        first: the number of the first one among those of all replicas.
        rows: of the batch that they are of: the replica's, or all replicas'.
        loss_weights: of their losses in the batch's.
    """

    sizes: list[int]
    layouts: list[int]
    first: int
    rows: int
    loss_weights: _C.LossWeights


class StepArguments(NamedTuple):
    """What the caller gave: a batch, which is to be split, or ready-made microbatches."""

    batch: Microbatch
    microbatches: Iterable[Microbatch] | None = None
    normalizer: Any = None
    has_target: bool = True  # False: the model's output is wanted, and no loss

    @property
    def is_list(self) -> bool:
        return self.microbatches is not None

    def parts(self) -> list[tuple[str, Microbatch]]:
        """The batch, or each microbatch, with what an error's text about it begins with.

        Raises:
            ValueError, TypeError: both are given, or something else.
        """
        if self.microbatches is None:
            return [("", self.batch)]
        if not self.batch.is_empty:
            raise ValueError(
                "a batch and microbatches= given, it must be one of them: each of "
                "microbatches has its own arguments and target"
            )
        _PARTS.check("microbatches", self.microbatches)
        parts = list(self.microbatches)
        for number, part in enumerate(parts):
            _PART.check(f"microbatches[{number}]", part)
        return [(f"microbatch {number}: ", part) for number, part in enumerate(parts)]
