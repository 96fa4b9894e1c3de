"""Numbers of a batch, its loss above all, read when they are wanted."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from . import _C


class LazyNumber(abc.ABC):
    """A number of a batch, which may not exist yet."""

    batch: int

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
        board: _C.LossBoard,
        slot: _C.LossSlot,
        batch: int,
        names: Sequence[str],
        on_failure: Callable[[], None],
    ) -> None:
        self._board = board
        self._on_failure = on_failure  # raises the first cause of any rank, if it is known
        self._slot = slot
        self._names = names  # of the metrics
        self._numbers: list[float] | None = None
        self.batch = batch

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
            try:
                self._numbers = self._board.wait(self._slot)
            except RuntimeError:
                self._on_failure()
                raise
        return self._numbers
