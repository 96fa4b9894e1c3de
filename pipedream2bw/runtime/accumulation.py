"""Which train_steps are one batch, whose gradients add up for one optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..ranks.operations import Announcement
from .runner import StageOptions


class BatchPart(NamedTuple):
    """Which part of its batch a train_step is.

    Attributes:
        batch: the batch's number: optimizer steps before it.
        begins: it is the first train_step, whose gradients replace those of the batch before.
        ends: it is the last one; the optimizer's step follows.
        num_averaged: the number of train_steps over which the batch's gradient is averaged.
        replica_weight: of the losses, in the gradients that replicas add up.
    """

    batch: int
    begins: bool
    ends: bool
    num_averaged: int
    replica_weight: float


class Accumulation:
    """Counts train_steps and optimizer steps, which have to follow each other.

    Attributes:
        hooks_average: hooks make replicas' gradients their mean, and nothing adds them up.
        num_updates: optimizer steps so far: the number of the batch that comes or waits for its
            step.
        steps_in_batch: train_steps of the last batch that has begun.
    """

    def __init__(self, options: StageOptions, num_replicas: int) -> None:
        # Of one batch; those under no_sync() come in addition.
        self._num_steps = options.pipeline.accumulate
        self._averages = options.pipeline.loss_reduction == "mean"
        self._num_replicas = num_replicas
        self._is_one_batch = options.is_one_batch
        self.hooks_average = False
        self._holds = False  # inside no_sync()
        self.num_updates = self.steps_in_batch = 0
        self._counted = 0  # train_steps that count towards a step
        self._held = 0  # the others
        self._last: BatchPart | None = None
        self._borrower: str | None = None

    @contextlib.contextmanager
    def weights_lent_to(self, borrower: str) -> Iterator[None]:
        """Inside, weights have other values for evaluations, and must not be read or changed."""
        before, self._borrower = self._borrower, borrower
        try:
            yield
        finally:
            self._borrower = before

    def check_weights_are_own(self, what: str) -> None:
        """Raises ValueError inside :meth:`weights_lent_to`."""
        if self._borrower is not None:
            raise ValueError(
                f"{what}: called inside {self._borrower}, where weights have other values for "
                "evaluations alone: call it after that"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The train_steps inside do not end their batch.

        Raises:
            ValueError: a batch has several train_steps anyway.
        """
        if self._num_steps > 1:
            raise ValueError(
                f"no_sync(): accumulate is {self._num_steps}, it must be 1: with accumulate=n the "
                "gradients of n train_steps are added up without it"
            )
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def next(self) -> BatchPart:
        """Which part of which batch the next train_step will be.

        Raises:
            ValueError: the batch is complete and waits for its step; or weights are lent.
        """
        self.check_weights_are_own("train_step()")
        if self._is_complete:
            raise ValueError(self._message(self.num_updates))
        ends = not self._holds and (self._counted + 1) % self._num_steps == 0
        begins = self._last is None or self._last.ends
        num_averaged = self._num_steps if self._averages else 1
        divided_later = self._num_replicas if self.hooks_average else 1
        # Where each replica has a batch of its own, their gradients are averaged.
        weight = divided_later / (1 if self._is_one_batch else self._num_replicas)
        return BatchPart(self.num_updates, begins, ends, num_averaged, weight)

    def take(self, part: BatchPart) -> None:
        """The train_step has begun."""
        self.steps_in_batch = 1 if part.begins else self.steps_in_batch + 1
        self._counted += not self._holds
        self._held += self._holds
        self._last = part

    def check_update(self) -> None:
        """Raises ValueError unless a step is due."""
        self.check_weights_are_own("opt.step()")
        if not self._is_complete:
            raise ValueError(self._message(self.num_updates + 1))

    @property
    def is_between_batches(self) -> bool:
        """Whether no batch has begun whose step has not been called."""
        return self._last is None or self._last.batch != self.num_updates

    def check_between_batches(self, what: str) -> None:
        """Raises ValueError if a batch has begun whose step has not been called.

        Also inside :meth:`weights_lent_to`.
        """
        self.check_weights_are_own(what)
        if not self.is_between_batches:
            steps = f"{self._counted + self._held} train_steps and {self.num_updates} opt.step()"
            raise ValueError(f"{what}: {steps} so far, a batch waits for its opt.step(): call it")

    @property
    def counts(self) -> tuple[int, int]:
        """How many train_steps so far count towards a step, and how many do not."""
        return self._counted, self._held

    def take_back(self, batch: int, counts: tuple[int, int]) -> None:
        """The batch and all after it have not been; the counts are those before it."""
        self.num_updates = batch
        self._counted, self._held = counts
        self._last = None

    def go_on_from(self, updates: int) -> None:
        """The next batch has this number."""
        self.num_updates = updates
        self._counted, self._held = updates * self._num_steps, 0
        self._last = None

    @property
    def _is_complete(self) -> bool:
        return self._last is not None and self._last.ends and self._last.batch == self.num_updates

    def _message(self, calls: int) -> str:
        n = self._num_steps
        each = "each train_step" if n == 1 else f"every {n} train_steps (accumulate={n})"
        held = f" and {self._held} under no_sync()" if self._held else ""
        outside = " outside no_sync()" if self._held else ""
        return (
            f"opt.step(): {calls} calls for {self._counted} train_steps{held}: exactly one call of "
            f"PipelineOptimizer.step() must follow {each}{outside}. To leave out a batch, call "
            "pipe.discard_batch(). For several train_steps a step, give accumulate=, or use "
            "pipe.no_sync()"
        )


def check_same_part(announced: Sequence[Announcement]) -> None:
    """Raises ValueError if some ranks are under no_sync() and others not."""
    ends = [rank.ends_batch for rank in announced]
    if len(set(ends)) > 1:
        shown = ", ".join(
            f"rank {rank}: {'outside' if end else 'inside'}" for rank, end in enumerate(ends)
        )
        raise ValueError(f"no_sync() must be entered on every rank, train_step is called {shown}")
