"""Trainings that are kept as they end, and what their losses say."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.kept import Kept


class Keyed(Protocol):
    """What is wanted of a run."""

    @property
    def key(self) -> str:
        """All that decides what it gives."""


_Wanted = TypeVar("_Wanted", bound=Keyed)
_Result = TypeVar("_Result")


class Workers(Generic[_Wanted, _Result]):
    """Trains in processes of their own, or in this one if one is enough, and keeps the results.

    Args:
        train: makes a run; a function of the main module.
        made: the class of the results, a dataclass.
        line: what is printed of a run that has ended.
        kept: a result is written there when it is there, and what is there is not trained again.
    """

    def __init__(
        self,
        train: Callable[[_Wanted], _Result],
        made: type[_Result],
        line: Callable[[_Wanted, _Result], str],
        *,
        jobs: int,
        kept: Path | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn) if jobs > 1 else None
        self._train, self._made, self._line = train, made, line
        self._kept = Kept(kept)

    def __enter__(self) -> Workers[_Wanted, _Result]:
        return self

    def run_all(self, wanted: Sequence[_Wanted]) -> list[_Result]:
        """Those that are not kept yet are trained, in this order."""
        left = [each for each in wanted if each.key not in self._kept]
        run = map if self._pool is None else self._pool.map
        for number, (each, result) in enumerate(zip(left, run(self._train, left), strict=True), 1):
            fields: Any = result
            self._kept.add(each.key, dataclasses.asdict(fields))
            print(
                f"{len(wanted) - len(left) + number:4}/{len(wanted)}  {self._line(each, result)}",
                flush=True,
            )
        return self.kept(wanted)

    def kept(self, wanted: Sequence[_Wanted]) -> list[_Result]:
        """What is there of these."""
        return [self._made(**self._kept[each.key]) for each in wanted if each.key in self._kept]

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def reached(losses: Sequence[float], loss: float) -> float:
    """The part of the run after which the loss was there, between two looks in a line."""
    if losses[0] <= loss:
        return 1 / len(losses)
    for i, (before, after) in enumerate(itertools.pairwise(losses)):
        if after <= loss:
            return (i + 1 + (before - loss) / (before - after)) / len(losses)
    raise AssertionError("the final loss is reached")
