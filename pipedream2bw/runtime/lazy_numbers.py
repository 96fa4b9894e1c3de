"""Numbers of a batch, its loss above all, read when they are wanted."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from .. import _C

if TYPE_CHECKING:
    from ..pipeline.module import PipelineModule


_Read = TypeVar("_Read")


class LazyNumber(abc.ABC):
    """A number of a ``train_step``, which may not exist yet."""

    def __init__(self, pipeline: PipelineModule, batch: int) -> None:
        self._pipeline = weakref.ref(pipeline)
        self.batch = batch  # the train_step's number

    def _wait(self, read: Callable[[], _Read]) -> _Read:
        """What ``read`` gives; if the pipeline fails first, the first cause of any rank."""
        try:
            return read()
        except RuntimeError:
            pipeline = self._pipeline()
            if pipeline is not None:
                pipeline._ending.check_open()
            raise

    def _wait_for_update(self, read: Callable[[], _Read]) -> _Read:
        """As :meth:`_wait`, for what exists after the batch's last backward on every stage."""
        pipeline = self._pipeline()
        if pipeline is not None and not self.done():
            pipeline._ending.check_open()
            missing = pipeline._steps_until_finished(self.batch)
            if missing > 0:
                raise RuntimeError(
                    f"{type(self).__name__} of train_step {self.batch}: its last backwards run "
                    f"during the train_steps after it, of which {missing} must still be called: "
                    f"read it then, or after flush()"
                )
        return self._wait(read)

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it can be read without waiting."""

    @abc.abstractmethod
    def item(self) -> float:
        """The number, waiting for it if need be."""

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        shown = self.item() if self.done() else f"batch {self.batch}, not there yet"
        return f"{type(self).__name__}({shown})"


class Loss(LazyNumber):
    """What :meth:`PipelineModule.train_step` returns: the batch's loss, which may not exist yet.

    ``float(loss)`` waits until the last stage has forwarded the batch; on any rank, at any time, in
    any order. Reading it one batch late costs nothing. With ``width`` > 1 it is this replica's own.
    So it is with :attr:`metrics`, which travel with it.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        board: _C.LossBoard,
        slot: _C.LossSlot,
        batch: int,
        names: Sequence[str],
    ) -> None:
        super().__init__(pipeline, batch)
        self._board = board
        self._slot = slot
        self._names = names  # of the metrics
        self._numbers: list[float] | None = None

    def done(self) -> bool:
        """Whether the loss can be read without waiting for the pipeline."""
        return self._numbers is not None or self._board.done(self._slot)

    def item(self) -> float:
        """The loss.

        Raises:
            RuntimeError: the pipeline failed before the loss existed; names the first cause.
        """
        return self._all()[0]

    @property
    def metrics(self) -> dict[str, float]:
        """The batch's metrics by name, each the mean over its rows. Waits and raises as item()."""
        return dict(zip(self._names, self._all()[1:], strict=True))

    def _all(self) -> list[float]:
        if self._numbers is None:
            self._numbers = self._wait(lambda: self._board.wait(self._slot))
        return self._numbers
