"""From what the caller gives to what each stage needs of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import _C
from ..capture.capture import split_model_args
from ..model.added_loss import LossWeight
from ..ranks.agreement import Announcement
from ..stages.modes import Mode
from .accumulation import BatchPart
from .local_stages import LocalStage, LocalStages
from .microbatch import SplitTree, common_rows, hash_of_shapes, microbatch_rows, split_values
from .normalizer import Normalizer
from .runner import RunInputs


@dataclasses.dataclass(kw_only=True)
class Given:
    """A train_step's or an evaluation's data on this rank: checked, not yet split."""

    part: BatchPart | None  # what the train_step is of its batch; None: it is an evaluation
    # What the other ranks need to know of it.
    announcement: Announcement = dataclasses.field(default_factory=Announcement)
    values: list[Any] = dataclasses.field(default_factory=list)  # stage 0: the model's inputs
    whole: list[bool] = dataclasses.field(default_factory=list)
    target: SplitTree | None = None  # last stage

    @property
    def training(self) -> bool:
        return self.part is not None


class Microbatches(NamedTuple):
    """A replica's microbatches, the same on all its ranks.

    Attributes:
        sizes: rows of each.
        layouts: numbers of equal shapes.
        first: the number of the first one among those of all replicas.
        rows: of the batch that they are of: the replica's, or all replicas'.
        loss_weights: of their losses in the batch's.
    """

    sizes: list[int]
    layouts: list[int]
    first: int
    rows: int
    loss_weights: _C.LossWeights


class Call(NamedTuple):
    """Arguments and target of a train_step or an evaluation."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None
    normalizer: Any = None


class Intake:
    """Checks calls, agrees on their microbatches and splits them.

    Args:
        stages: those of this process.
        replicated: names of arguments that every microbatch gets whole.
        losses_are_means: over microbatches' rows; otherwise sums.
    """

    def __init__(
        self, stages: LocalStages, replicated: Sequence[str], *, losses_are_means: bool
    ) -> None:
        self._grid = stages.grid
        self._losses_are_means = losses_are_means
        self._num_microbatches = stages.schedule.total_microbatches
        self._of_replicas = stages.options.microbatches_of_replicas
        self._is_one_batch = stages.options.is_one_batch
        self._normalizer = Normalizer(stages.options.normalizer, self._grid)
        of_all = self._of_replicas or (self._num_microbatches,) * self._grid.width
        self._first = sum(of_all[: self._grid.replica])
        self._replicated = replicated
        self._layouts: dict[tuple[int, int], int] = {}  # (hash of shapes, rows) -> number

    def take(self, call: Call, part: BatchPart | None, mode: Mode, *, is_train: bool) -> Given:
        """Checks what this rank was given, before ranks agree.

        Args:
            part: what the train_step is of its batch; None: it is an evaluation.
            is_train: whether the modules are in train mode.

        Raises:
            ValueError, TypeError: the call is none that the captured model takes.
        """
        given = Given(part=part)
        rows = target_rows = number = normalizer = -1
        grid = self._grid
        # The first pipeline evaluates alone.
        stages = grid.stages if given.training else [s for s in grid.stages if s < grid.depth]
        if any(map(grid.is_first, stages)):
            given.values = split_model_args(mode.captured, call.args, call.kwargs)
            given.whole = mode.whole
            rows = self._rows(given, mode)
            number = hash_of_shapes(given.values, given.whole, (is_train, given.training))
        if any(map(grid.is_last, stages)) and given.training:
            given.target = SplitTree.of(call.target, "target", self._replicated)
            target_rows = -1 if given.target.rows is None else given.target.rows
            if rows >= 0 and target_rows >= 0 and rows != target_rows:
                raise ValueError(_rows_differ(rows, target_rows))
            normalizer = self._normalizer.of(call.target, call.normalizer)
        ends_batch = -1 if part is None else int(part.ends)
        given.announcement = Announcement(
            rows, target_rows, number, int(is_train), ends_batch, normalizer
        )
        return given

    def _rows(self, given: Given, mode: Mode) -> int:
        captured = mode.captured
        named = [
            (f"argument {captured.signature.tensors[position].path}", value)
            for position, value, keep in zip(
                captured.input_positions, given.values, given.whole, strict=True
            )
            if not keep
        ]
        rows = common_rows(named)
        if rows is None:
            raise ValueError(
                "arguments: no tensor to split into microbatches; a batch needs one with rows "
                "in dimension 0 that is not in replicated"
            )
        if given.training and rows < self._num_microbatches:
            raise ValueError(
                f"rows of the batch: {rows}, num_microbatches: {self._num_microbatches}: every "
                "microbatch needs at least 1 row"
            )
        return rows

    def microbatches(
        self, announced: Sequence[Announcement], part: BatchPart | None
    ) -> Microbatches:
        """Decides how this replica's rows are split, given what all ranks were called with.

        Args:
            part: as that of :meth:`take`.

        Raises:
            ValueError: on every rank: what the ranks were given does not go together.
        """
        training = part is not None
        modes = [("eval", "train")[rank.training] for rank in announced]
        if len(set(modes)) > 1:
            listed = ", ".join(f"rank {rank}: {mode}" for rank, mode in enumerate(modes))
            raise ValueError(f"train() or eval() must be the same on every rank, got {listed}")
        grid = self._grid
        for replica in range(grid.width):
            first = announced[grid.process_of(0, replica, 0)]
            begins = range(0, grid.num_stages, grid.depth) if training else (0,)
            for shard, begin in itertools.product(range(grid.num_shards), begins):
                last = announced[grid.process_of(begin + grid.depth - 1, replica, shard)]
                if last.target_rows >= 0 and first.argument_rows != last.target_rows:
                    raise ValueError(_rows_differ(first.argument_rows, last.target_rows))
                self._check_same_batch(announced, replica, shard, begin)
        mine = announced[grid.process_of(0)]
        count = self._num_microbatches
        if not training:
            count = max(1, min(mine.argument_rows, count))
        sizes = microbatch_rows(mine.argument_rows, count)
        layouts = [
            self._layouts.setdefault((mine.shapes, size), len(self._layouts)) for size in sizes
        ]
        rows, counts = [mine.argument_rows], [count]
        if training and self._is_one_batch:
            counts = list(self._of_replicas) or [count] * grid.width
            rows = [
                announced[grid.process_of(0, replica)].argument_rows
                for replica in range(grid.width)
            ]
        if self._losses_are_means:
            weights = _weights_of_means(sizes, rows, counts)
        elif part is not None:
            weights = self._normalizer.weights(announced, count, begins_batch=part.begins)
        else:
            weights = _C.LossWeights()
        return Microbatches(sizes, layouts, self._first, sum(rows), weights)

    def inputs(
        self, given: Given, stage: LocalStage, mode: Mode, microbatches: Microbatches
    ) -> RunInputs:
        """The stage's share of what was given."""
        grid, streams = self._grid, stage.weights.streams
        sizes, layouts, _, rows, weights = microbatches
        mine = slice(None)
        if given.training:  # a pipeline's part of the microbatches
            count = len(sizes) // grid.num_pipelines
            first = grid.pipeline(stage.index) * count
            mine = slice(first, first + count)
        inputs = RunInputs(
            bound=stage.bound[mode.wiring],
            sizes=sizes[mine],
            total_rows=rows,
            layouts=layouts[mine],
            training=given.training,
        )
        if given.part is not None:
            inputs.begins = given.part.batch if given.part.begins else None
            weight = LossWeight(
                divisor=weights.divisor,
                replica_weight=given.part.replica_weight,
                num_averaged=given.part.num_averaged,
            )
            factors: Sequence[float | None] = weights.factors or [None] * len(sizes)
            inputs.loss_weights = [
                dataclasses.replace(weight, factor=factor) for factor in factors[mine]
            ]
        if grid.is_first(stage.index):
            inputs.values = split_values(given.values, given.whole, sizes, streams)[mine]
        if grid.is_last(stage.index) and given.training:
            assert given.target is not None
            inputs.targets = given.target.split(sizes, streams)[mine]
        return inputs

    def _check_same_batch(
        self, announced: Sequence[Announcement], replica: int, shard: int, begin: int
    ) -> None:
        """Raises ValueError unless all first stages of the replica were given one batch."""
        process_of = self._grid.process_of
        ranks = [process_of(0, replica, 0), process_of(begin, replica, shard)]
        first, other = (announced[rank] for rank in ranks)
        if first.argument_rows != other.argument_rows:
            raise ValueError(
                f"rows of the arguments on rank {ranks[0]}: {first.argument_rows}, on rank "
                f"{ranks[1]}: {other.argument_rows}: all first stages of a replica are given "
                "the same batch"
            )
        if first.shapes != other.shapes:
            raise ValueError(
                f"arguments on rank {ranks[0]} and on rank {ranks[1]}: their shapes or dtypes "
                "differ: all first stages of a replica are given the same batch"
            )


def _weights_of_means(
    sizes: Sequence[int], rows: Sequence[int], counts: Sequence[int]
) -> _C.LossWeights:
    """The weights of a replica's microbatches in the mean over the batch's rows.

    Args:
        sizes: rows of each of them.
        rows, counts: of each part of the batch, which makes so many microbatches.
    """
    kinds = {divmod(of_part, count) for of_part, count in zip(rows, counts, strict=True)}
    are_alike = len(kinds) == 1 and kinds.pop()[1] == 0
    if are_alike:
        return _C.LossWeights(divisor=sum(counts))
    return _C.LossWeights(factors=[size / sum(rows) for size in sizes])


def _rows_differ(rows: int, target_rows: int) -> str:
    return (
        f"rows of the arguments: {rows}, rows of the target: {target_rows}: they must agree; name "
        "a tensor in replicated=() to pass it whole to every microbatch"
    )
