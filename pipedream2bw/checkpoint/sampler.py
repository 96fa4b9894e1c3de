"""Which rows of a dataset are in which batch, also when a run goes on later or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from .. import _C
from ..checks import check_microbatches_of_replicas, check_whole_number
from ..rules import BOOL

_STATE = ("seed", "length", "shuffle", "position")


class Row(int):
    """The number of a row of a dataset."""

    key: int
    """A function of seed, epoch and row: what :class:`SeededRows` draws by."""


class ResumableSampler(Sampler[list[int]]):
    """Gives a ``DataLoader`` the rows of each batch; its position is saved and loaded.

    The rows of a dataset follow each other in an order that is drawn anew for each epoch. Every
    ``batch`` of them are a batch. Each row is in exactly one batch an epoch, as in CheckFreq (FAST
    2021, section 4.1). A batch at an epoch's end takes its last rows from the next one. Rank
    ``replica`` of ``width`` gets an equal, contiguous part of each batch, or one as large as its
    number of microbatches. The batches themselves depend on ``length``, ``batch``, ``seed`` and
    ``shuffle`` alone, so another number of replicas goes on with the same ones.

    >>> sampler = pd2.ResumableSampler(len(dataset), batch=64)
    >>> while sampler.epoch < 3:
    ...     for x, y in DataLoader(dataset, batch_sampler=sampler):
    ...         loss = pipe.train_step(x, target=y)
    ...         opt.step()
    ...         sampler.advance()

    Iterating starts at ``position`` and ends with the epoch. Only ``advance()`` moves the position:
    workers that fetch batches ahead do not.

    Args:
        length: rows of the dataset.
        batch: rows of a batch, of all replicas together.
        width: number of replicas, such as ``pipe.width``.
        replica: this process's, from 0.
        num_microbatches: a number for each replica, as :class:`PipelineModule` takes them: the
            parts are to each other as these. None: all parts are equal.
        seed: of the orders.
        shuffle: whether orders are drawn; otherwise rows come as the dataset has them.

    Raises:
        TypeError: a number is not an int, or ``shuffle`` not a bool.
        ValueError: a number is out of range, or the batch cannot be divided so.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        *,
        width: int = 1,
        replica: int = 0,
        num_microbatches: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_whole_number("length", length)
        check_whole_number("batch", batch, at_most=length)
        check_whole_number("width", width)
        check_whole_number("replica", replica, at_least=0, at_most=width - 1)
        check_whole_number("seed", seed, at_least=0, at_most=2**63 - 1)
        BOOL.check("shuffle", shuffle)
        parts = (1,) * width
        if num_microbatches is not None:
            parts = check_microbatches_of_replicas(num_microbatches, width)
        if batch % sum(parts):
            divided = f"num_microbatches: {list(parts)}" if num_microbatches else f"width: {width}"
            raise ValueError(
                f"batch: {batch}, {divided}: the batch must be a multiple of {sum(parts)}"
            )
        self.length = length
        self.batch = batch
        self.width = width
        self.replica = replica
        rows = [batch * part // sum(parts) for part in parts]
        self._before, self._share = sum(rows[:replica]), rows[replica]
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        """Rows of all batches so far, of all replicas and epochs."""
        self._ended_at: int | None = None  # where an iteration began that came to its end

    @property
    def epoch(self) -> int:
        """The epoch, from 0, in which the next batch begins."""
        return self.position // self.length

    def __len__(self) -> int:
        """Returns the number of batches that an iteration would give now."""
        return -(-(self._end_of_epoch() - self.position) // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Gives this replica's rows of each batch that begins in this epoch.

        Raises:
            RuntimeError: the last iteration came to its end, and ``advance()`` was never called: it
                would give the same batches again.
        """
        begin, end = self.position, self._end_of_epoch()
        if self._ended_at == begin:
            raise RuntimeError(
                "advance() was not called since the last iteration: call it after each train_step"
            )
        return self._batches(begin, end)

    def advance(self, batches: int = 1) -> None:
        """Moves the position past as many batches: they have been trained."""
        check_whole_number("batches", batches, at_least=0)
        self.position += batches * self.batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and what it is a position in."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a ``state_dict()`` was made, on any number of replicas.

        Raises:
            ValueError: the state is not a sampler's, or of other rows: another ``length``, ``seed``
                or ``shuffle``.
            TypeError: the position is not an int.
        """
        if set(state) != set(_STATE):
            raise ValueError(f"state: {sorted(state)}, it must have {sorted(_STATE)}")
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{name}: {getattr(self, name)}, in the loaded state: {state[name]}: the same "
                    "rows would not come in the same order"
                )
        check_whole_number("position", state["position"], at_least=0)
        self.position = state["position"]
        self._ended_at = None

    def _end_of_epoch(self) -> int:
        return (self.epoch + 1) * self.length

    def _batches(self, begin: int, end: int) -> Iterator[list[int]]:
        share = self._share
        order = self._order(begin // self.length)
        for first in range(begin, end, self.batch):
            start = first + self._before - (end - self.length)
            rows = self._rows(begin // self.length, order[start : start + share])
            if len(rows) < share:  # the last rows of an epoch's last batch
                stop = start + share - self.length
                following = self._order(begin // self.length + 1)
                rows += self._rows(begin // self.length + 1, following[max(0, stop - share) : stop])
            yield rows
        self._ended_at = begin

    def _rows(self, epoch: int, numbers: torch.Tensor) -> list[int]:
        seed, rows = _C.mix_seed(self.seed, epoch), list[int]()
        for number in numbers.tolist():
            rows.append(row := Row(number))
            row.key = _C.mix_seed(seed, number)
        return rows

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(_C.mix_seed(self.seed, epoch))
        return torch.randperm(self.length, generator=generator)
