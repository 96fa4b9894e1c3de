"""Waiting for what other processes write, and for a file system that may hang."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ..ranks.deadline import Call
from .folder import Folder

_LOOK_SECONDS = 0.02
_SLICE_SECONDS = 0.05
_FAILED_SECONDS = 2.0
"""Without a byte more of other processes, once the pipeline has failed."""
_SHARE = 0.5
"""A file system that is silent for this share of ``timeout`` hangs, before others give up."""

_Result = TypeVar("_Result")


def done_by(done: Future[_Result], end: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Waits up to a time; says whether it is done.

    Args:
        end: of ``time.monotonic()``.
        is_over: says that the waiting is, for another reason.
    """
    while not done.done() and time.monotonic() < end and not is_over():
        wait([done], min(_SLICE_SECONDS, max(0.0, end - time.monotonic())))
    return done.done()


def in_time(folder: Folder, timeout: float, action: str, call: Callable[[], _Result]) -> _Result:
    """Returns what ``call`` gives, which works in the folder, however long that takes.

    A call into a file system that hangs cannot be ended from outside. So it is made in a thread,
    which is left behind once nothing has come of the folder for half of ``timeout``.

    Args:
        action: what it does, for the error.

    Raises:
        TimeoutError: the file system hangs.
    """
    made = Call(f"pd2 {action}", call)
    seen, since = -1, 0.0

    def hangs() -> bool:
        nonlocal seen, since
        now = time.monotonic()
        if folder.num_calls != seen:
            seen, since = folder.num_calls, now
        return now - since > _SHARE * timeout

    if not done_by(made.result, math.inf, hangs):
        raise TimeoutError(
            f"{folder.path}: {action}: the file system has not answered for {_SHARE * timeout:g} s"
        )
    return made.get()


class Waiting:
    """Looks for something from time to time, up to a deadline.

    Once the pipeline has failed, other processes may have ended: then it only waits as long as
    they write.

    Args:
        has_failed: whether the pipeline has.
        written: how much has been written.
    """

    def __init__(
        self, timeout: float, has_failed: Callable[[], bool], written: Callable[[], int]
    ) -> None:
        self._timeout = timeout
        self._has_failed = has_failed
        self._written = written
        self._begin = time.monotonic()
        self._pause = _LOOK_SECONDS
        self._grown = (-1, 0.0)  # the most that was written, and since when

    def look(self, failure: str) -> None:
        """Sleeps, or raises TimeoutError with the failure when the time is over."""
        now = time.monotonic()
        if now - self._begin > self._timeout:
            raise TimeoutError(
                f"{failure} within {self._timeout:g} s: is the folder shared by all?"
            )
        if self._has_failed():
            written = self._written()
            if written > self._grown[0]:
                self._grown = written, now
            if now - self._grown[1] > _FAILED_SECONDS:
                raise TimeoutError(f"{failure}, and the pipeline has failed")
        time.sleep(self._pause)
        self._pause = min(1.0, 1.5 * self._pause)
