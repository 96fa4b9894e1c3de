"""Calls that a stage makes between two of its runs, as a save's copies are."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable

Call = Callable[[], None]


class StageCalls:
    """The calls of one stage; those for which it has no occasion any more are dropped."""

    def __init__(self) -> None:
        self._before: list[tuple[int, Call]] = []  # and the run
        self._once: dict[int, tuple[int, Call]] = {}  # by number; and the run
        self._numbers = itertools.count()

    def before(self, run: int, call: Call) -> None:
        """Calls ``call`` before the first forward of the run, when those before it have ended.

        Or in :meth:`make`.
        """
        self._before.append((run, call))

    def make(self, run: float = math.inf) -> None:
        """Makes the calls that are due before the run; without a run all, the stage being idle."""
        while self._before and self._before[0][0] <= run:
            self._before.pop(0)[1]()

    def once(self, run: int, call: Call) -> Call:
        """Gives for the engine what calls ``call``, if that is not dropped before.

        Python's garbage collector cannot look into the engine: if that held ``call`` itself, what
        this refers to would stay when the pipeline has ended, or keep it from ending.

        Args:
            run: the first one that is not to have begun.
        """
        number = next(self._numbers)
        self._once[number] = (run, call)
        method = weakref.WeakMethod(self._make_once)
        return lambda: None if (alive := method()) is None else alive(number)

    def _make_once(self, number: int) -> None:
        found = self._once.pop(number, None)
        if found is not None:
            found[1]()

    def take_back(self, run: int) -> None:
        """Drops calls before later runs, which will not be. The stage is idle."""
        self._before = [each for each in self._before if each[0] <= run]
        self._once = {number: each for number, each in self._once.items() if each[0] <= run}

    def forget(self) -> None:
        """Drops all calls: there will be no run any more."""
        self._before.clear()
        self._once.clear()
