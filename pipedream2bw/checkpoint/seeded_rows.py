"""A dataset whose rows draw the same random numbers whenever and wherever they are read."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ..model.sources import sources_kept
from .sampler import Row


class SeededRows(Dataset[Any]):
    """A dataset that draws (augmentation), for a run that resumes.

    What a row draws follows from the seed of the :class:`ResumableSampler`, the epoch and the row.
    So a resumed run gets the rows of the undisturbed one, with any number of workers and replicas.

    >>> rows = pd2.SeededRows(dataset)
    >>> for x, y in DataLoader(rows, batch_sampler=sampler):
    ...     loss = pipe.train_step(x, target=y)
    ...     opt.step()
    ...     sampler.advance()

    The default generators of Python, torch (on the CPU) and NumPy are seeded for each row and set
    back after it. What a ``collate_fn`` draws, or a generator of the dataset's own, is not covered.

    Args:
        dataset: gives a row for its number.

    Raises:
        TypeError: the dataset is an ``IterableDataset``, or a row's number is not of a
            ``ResumableSampler``.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset: {type(dataset).__name__} given, SeededRows takes one that gives a row "
                "for its number: seed an IterableDataset yourself, by what it has given"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, row: int) -> Any:
        if not isinstance(row, Row):
            raise TypeError(
                f"row {row!r}: {type(row).__name__} given, SeededRows takes a ResumableSampler's: "
                "give DataLoader(pd2.SeededRows(dataset), batch_sampler=sampler)"
            )
        with sources_kept():
            random.seed(row.key)
            torch.default_generator.manual_seed(row.key)
            if (numpy := sys.modules.get("numpy")) is not None:
                # A word more than Python's: two words would give both the same numbers.
                numpy.random.seed([row.key % 2**32, row.key >> 32, 1])
            return self.dataset[row]
