"""Takes back a batch in which the user's code failed, and those after it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ..errors import StageError, from_document, reworded, to_document
from .accumulation import Accumulation, BatchPart
from .extension import Extensions, TakenBack
from .local_stages import LocalStages


class _Begun(NamedTuple):
    """How many calls there had been when a batch began."""

    train_steps: int
    counts: tuple[int, int]


class Discarding:
    """Knows where the batches begin that may be taken back, and takes them back.

    Args:
        extensions: are told after batches were taken back.

    Attributes:
        num_times: how often batches were taken back.
    """

    def __init__(
        self, stages: LocalStages, accumulation: Accumulation, extensions: Extensions
    ) -> None:
        self._stages = stages
        self._control = stages.control
        self._accumulation = accumulation
        self._begun: dict[int, _Begun] = {}  # by batch
        # The first train_step each time; None: from here on they are counted anew.
        self._taken_back: list[int | None] = []
        self._extensions = extensions

    @property
    def num_times(self) -> int:
        return len(self._taken_back)

    def begin(self, part: BatchPart, train_step: int) -> None:
        """Remembers where a batch begins, as long as it may be taken back."""
        if part.begins:
            self._begun[part.batch] = _Begun(train_step, self._accumulation.counts)
            self._begun.pop(part.batch - self._stages.schedule.most_batches_behind - 2, None)

    def first_train_step(self, batch: int) -> int:
        """The number of a batch's first train_step, if it may be taken back."""
        return self._begun[batch].train_steps

    def count_anew(self) -> None:
        """Batches get numbers that others had before. Drained."""
        self._begun.clear()
        self._taken_back.append(None)
        self._stages.verdicts.forget()
        for executor in self._stages.executors:
            executor.count_anew()
        for stage in self._stages:
            stage.runner.count_anew()

    def take_back(self, batch: int, num_train_steps: int) -> tuple[TakenBack, BaseException | None]:
        """Makes as if the batch and all later ones had not been; every rank does, drained.

        Gives what was taken back, and the Python exception that is the cause if it was raised here.
        """
        stages, discards = self._stages, self._control.discards
        failure = self._why_discarded(batch)
        mine = discards.failure
        original = stages.take_error(mine[2] if mine and mine[0] == batch else -1)
        is_evaluation = batch not in self._begun
        now = _Begun(num_train_steps, self._accumulation.counts)
        begun = self._begun.get(batch, now)
        discarded = tuple(range(begun.train_steps, num_train_steps))
        updates = max(0, self._accumulation.num_updates - batch)
        for executor in stages.executors:
            executor.take_back(batch, begun.train_steps)
        if not is_evaluation:
            stages.verdicts.forget()
        for stage in stages:
            stage.runner.take_back(batch, begun.train_steps)
        text = "The evaluation was discarded; the pipeline is open"
        if not is_evaluation:
            shown = ", ".join(map(str, discarded))
            what = f"train_step {shown} was" if len(discarded) == 1 else f"train_steps {shown} were"
            text = (
                f"{what} discarded and changed nothing: the weights are version {batch}. Go on "
                "with the next batch"
            )
            self._accumulation.take_back(batch, begun.counts)
        self._begun = {other: kept for other, kept in self._begun.items() if other < batch}
        error = reworded(failure, f"{str(failure).rstrip('.')}. {text}")
        error.discarded = discarded
        error.__cause__ = failure.__cause__
        taken = TakenBack(batch, begun.train_steps, updates, error)
        self._taken_back.append(taken.train_step)
        discards.go_on()
        for extension in self._extensions:
            extension.taken_back(taken)
        return taken, original

    def _why_discarded(self, batch: int) -> StageError:
        """Why a batch is discarded. Every rank calls it, drained."""
        control = self._control
        mine = control.discards.failure
        error = mine[1] if mine and mine[0] == batch else None
        if control.peers is None:
            assert error is not None
            return error
        told = control.told_by_all(None if error is None else to_document(error))
        return from_document(next(document for document in told if document is not None))

    def is_taken_back(self, train_step: int, num_times: int) -> bool:
        """Whether a train_step was discarded.

        Args:
            num_times: how often batches had been taken back when it was called.
        """
        since = itertools.takewhile(lambda first: first is not None, self._taken_back[num_times:])
        return any(train_step >= first for first in since if first is not None)
