"""From what the caller gives to what each stage needs of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import _C
from ..capture.capture import split_model_args
from ..model.added_loss import LossWeight
from ..ranks.operations import Announcement
from ..stages.modes import Mode
from .accumulation import BatchPart
from .local_stages import LocalStage, LocalStages
from .microbatch import (
    SplitTree,
    common_rows,
    hash_of,
    hash_of_shapes,
    hash_of_values,
    microbatch_rows,
    refuse_gradients,
    split_values,
)
from .normalizer import Normalizer
from .runner import RunInputs
from .same_batch import check_rows, check_same_batch
from .step_data import Listed, Microbatches, StepArguments, StepData

_Part = TypeVar("_Part")


class Intake:
    """Checks calls, agrees on their microbatches and splits them."""

    def __init__(self, stages: LocalStages) -> None:
        options = stages.options.pipeline
        self._grid = stages.grid
        self._losses_are_means = options.loss_reduction == "mean"  # otherwise sums
        self._num_microbatches = stages.schedule.total_microbatches
        self._is_one_batch = stages.options.is_one_batch
        self._normalizer = Normalizer(options.normalizer, self._grid)
        of_replicas = stages.options.microbatches_of_replicas
        self._of_replicas = of_replicas or (self._num_microbatches,) * self._grid.width
        self._first = sum(self._of_replicas[: self._grid.replica])
        self._replicated = tuple(options.replicated)
        self._layouts: dict[tuple[int, int], int] = {}  # (hash of shapes, rows) -> number

    def take(
        self, arguments: StepArguments, part: BatchPart | None, mode: Mode, *, is_train: bool
    ) -> StepData:
        """Checks what this rank was given, before ranks agree.

        Args:
            part: what the train_step is of its batch; None: it is an evaluation.
            is_train: whether the modules are in train mode.

        Raises:
            ValueError, TypeError: the call is none that the captured model takes.
        """
        data = StepData(part=part)
        rows: list[int] = []
        shapes: list[int] = []
        target_rows: list[int] = []
        normalizer = -1
        grid = self._grid
        # The first pipeline evaluates alone.
        stages = grid.stages if data.training else [s for s in grid.stages if s < grid.depth]
        is_first = any(map(grid.is_first, stages))
        is_last = arguments.has_target and any(map(grid.is_last, stages))
        parts = arguments.parts() if is_first or is_last else []
        if arguments.is_list and (is_first or is_last):
            self._check_number("microbatches", len(parts), data, most=self._num_microbatches)
        if is_first:
            data.whole = mode.whole
            for place, each in parts:
                values = split_model_args(mode.captured, each.args, each.kwargs)
                data.values.append(values)
                rows.append(_rows_of(values, mode, place, training=data.training))
                shapes.append(hash_of_shapes(values, mode.whole, (is_train, data.training)))
                sizes = rows[-1:] if arguments.is_list else self._sizes(rows[-1])
                new = {size for size in sizes if (shapes[-1], size) not in self._layouts}
                mode.check_shapes(values, new, place)
            if arguments.has_target and not arguments.is_list:
                self._check_number("rows of the batch", rows[0], data)
        if is_last:
            for place, each in parts:
                target = SplitTree.of(each.target, place + "target", self._replicated)
                data.targets.append(target)
                target_rows.append(-1 if target.rows is None else target.rows)
            check_rows(rows, target_rows)
            normalizer = self._normalizer.of(
                [each.target for _, each in parts], arguments.normalizer
            )
        of_values = -1
        if grid.in_processes and parts and arguments.has_target:
            of_values = hash_of_values([each.target for _, each in parts])
        if arguments.is_list:
            data.listed = Listed(tuple(rows), tuple(shapes), tuple(target_rows))
        data.announcement = Announcement(
            argument_rows=sum(rows) if rows else -1,
            target_rows=sum(target_rows) if min(target_rows, default=-1) >= 0 else -1,
            target=of_values,
            shapes=hash_of((rows, shapes)) if arguments.is_list else next(iter(shapes), -1),
            training=int(is_train),
            ends_batch=-1 if part is None else int(part.ends),
            normalizer=normalizer,
            is_list=int(arguments.is_list) if is_first or is_last else -1,
        )
        return data

    def _sizes(self, rows: int, replica: int | None = None) -> list[int]:
        """Rows of each microbatch of a replica's batch, which is to be split."""
        replica = self._grid.replica if replica is None else replica
        return microbatch_rows(rows, max(1, min(rows, self._of_replicas[replica])))

    def _check_number(
        self, what: str, number: int, data: StepData, most: int | None = None
    ) -> None:
        least = self._grid.num_pipelines if data.training else 1
        if number < least:
            why = f": each of the schedule's {least} pipelines has a microbatch" * (least > 1)
            raise ValueError(f"{what}: {number}, at least {least} needed{why}")
        if most is not None and number > most:
            raise ValueError(
                f"{what}: {number}, num_microbatches: {most}: a train_step has at most so many"
            )

    def microbatches(
        self,
        announced: Sequence[Announcement],
        listed: Sequence[Listed | None],
        part: BatchPart | None,
    ) -> Microbatches:
        """Decides how this replica's rows are split, given what all ranks were called with.

        Args:
            listed: of each rank; empty: nobody was given ready-made microbatches.
            part: as that of :meth:`take`.

        Raises:
            ValueError: on every rank: what the ranks were given does not go together.
        """
        grid = self._grid
        if grid.in_processes:
            check_same_batch(grid, announced, listed, training=part is not None)

        def sizes_of(replica: int) -> list[int]:
            first = grid.process_of(0, replica)
            if listed and (mine := listed[first]) is not None:
                return list(mine.rows)
            return self._sizes(announced[first].argument_rows, replica)

        sizes = sizes_of(grid.replica)
        first = grid.process_of(0)
        mine = listed[first] if listed else None
        shapes = [announced[first].shapes] * len(sizes) if mine is None else mine.shapes
        kinds = list(zip(shapes, sizes, strict=True))
        numbers = {
            kind: self._layouts.setdefault(kind, len(self._layouts))
            for kind in dict.fromkeys(kinds)
        }
        layouts = [numbers[kind] for kind in kinds]
        of_batch = sizes
        if self._is_one_batch:
            of_batch = [size for replica in range(grid.width) for size in sizes_of(replica)]
        if part is not None:
            sizes, layouts = self._placed(sizes, 0), self._placed(layouts, -1)
        if not self._losses_are_means:
            weights = self._normalizer.weights(announced, len(sizes), part)
        elif len(set(of_batch)) == 1:
            weights = _C.LossWeights(divisor=len(of_batch))
        else:  # those of the mean over the batch's rows
            rows = sum(of_batch)
            weights = _C.LossWeights(factors=[size / rows for size in sizes])
        return Microbatches(sizes, layouts, self._first, sum(of_batch), weights)

    def _placed(self, numbers: Sequence[int], missing: int) -> list[int]:
        """The microbatches' numbers at their places in the schedule's batch."""
        pipelines = self._grid.num_pipelines
        room = self._num_microbatches // pipelines
        placed: list[int] = []
        begin = 0
        for count in microbatch_rows(len(numbers), pipelines):
            placed += [*numbers[begin : begin + count], *([missing] * (room - count))]
            begin += count
        return placed

    def inputs(
        self, data: StepData, stage: LocalStage, mode: Mode, microbatches: Microbatches
    ) -> RunInputs:
        """The stage's share of what was given."""
        grid, streams = self._grid, stage.weights.streams
        sizes, layouts, _, rows, weights = microbatches
        present = [size for size in sizes if size] if data.training else sizes
        # The stage's microbatches: at their places in the batch, and among those that are there.
        placed = mine = slice(0, len(sizes))
        if data.training:  # a pipeline's part of the microbatches
            count = len(sizes) // grid.num_pipelines
            begin = grid.pipeline(stage.index) * count
            before, here = (
                len(part) - part.count(0) for part in (sizes[:begin], sizes[begin : begin + count])
            )
            placed, mine = slice(begin, begin + here), slice(before, before + here)
        inputs = RunInputs(
            bound=stage.bound[mode.wiring],
            sizes=present[mine],
            total_rows=rows,
            layouts=layouts[placed],
            training=data.training,
        )
        if data.part is not None:
            inputs.begins = data.part.batch if data.part.begins else None
            factors: Sequence[float | None] = weights.factors or [None] * len(sizes)
            weight_of = {
                factor: LossWeight(
                    divisor=weights.divisor,
                    factor=factor,
                    replica_weight=data.part.replica_weight,
                    num_averaged=data.part.num_averaged,
                )
                for factor in set(factors[placed])
            }
            inputs.loss_weights = [weight_of[factor] for factor in factors[placed]]
        if grid.is_first(stage.index):
            inputs.values = _by_microbatch(
                data.values, present, lambda part, of: split_values(part, data.whole, of, streams)
            )[mine]
        if grid.is_last(stage.index) and data.targets:
            inputs.targets = _by_microbatch(
                data.targets, present, lambda part, of: part.split(of, streams)
            )[mine]
        # A layer may write to what it is given, which may be the target too; loss_fn to a target,
        # which a second pipeline's stage would not know.
        if data.training and not mode.captured.writes_to_inputs:
            device = streams.device
            if inputs.values is not None:
                inputs.watch(itertools.chain.from_iterable(data.values), device)
            if inputs.targets is not None and grid.num_pipelines == 1:
                inputs.watch(itertools.chain.from_iterable(t.leaves for t in data.targets), device)
        return inputs


def _rows_of(values: Sequence[Any], mode: Mode, place: str, *, training: bool) -> int:
    captured = mode.captured
    named = [
        (f"{place}argument {captured.signature.tensors[position].path}", value)
        for position, value in zip(captured.input_positions, values, strict=True)
    ]
    if training:
        refuse_gradients(named)
    rows = common_rows([each for each, keep in zip(named, mode.whole, strict=True) if not keep])
    if rows is None:
        raise ValueError(
            f"{place}arguments: no tensor to split into microbatches; a batch needs one with rows "
            "in dimension 0 that is not in replicated"
        )
    if place and rows == 0:
        raise ValueError(f"{place}rows: 0, at least 1 is needed")
    return rows


def _by_microbatch(
    parts: Sequence[_Part],
    sizes: Sequence[int],
    split: Callable[[_Part, Sequence[int]], list[Any]],
) -> list[Any]:
    """What ``split`` makes of one part, or of each of the ready-made microbatches."""
    if len(parts) == 1:
        return split(parts[0], sizes)
    return [split(part, [size])[0] for part, size in zip(parts, sizes, strict=True)]
