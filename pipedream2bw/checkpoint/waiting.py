"""Waiting for what other processes write, and for a file system that may hang."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from ..ranks.deadline import CallInThread
from ..ranks.operations import Answer, Operation
from ..runtime.session import Session
from .folder import Folder

_LOOK_SECONDS = 0.02
_SLICE_SECONDS = 0.05
_FAILED_SECONDS = 2.0
"""Without a byte more of other processes, once the pipeline has failed."""
_SHARE = 0.5
"""A file system that is silent for this share of ``timeout`` hangs, before others give up."""
_SIGN_SHARE = 0.25
"""A rank that reads for this share of ``timeout`` tells the others that it goes on."""

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


class FolderCall(CallInThread[_Result]):
    """A call that works in a folder, however long that takes.

    A call into a file system that hangs cannot be ended from outside. So it is made in a thread,
    which is left behind once nothing has come of the folder for half of ``timeout``.

    Args:
        action: what it does, for the error.
    """

    def __init__(
        self, folder: Folder, timeout: float, action: str, call: Callable[[], _Result]
    ) -> None:
        super().__init__(f"pd2 {action}", call)
        self._folder = folder
        self._silence = _SHARE * timeout
        self._action = action
        self._seen = (-1, 0.0)  # how often the file system had been called, and since when

    def is_done(self, seconds: float = math.inf) -> bool:
        """Waits so many seconds at most; says whether it is done. TimeoutError if it hangs."""
        if done_by(self.result, time.monotonic() + seconds, self._hangs):
            return True
        if self._hangs():
            raise TimeoutError(
                f"{self._folder.path}: {self._action}: the file system has not answered for "
                f"{self._silence:g} s"
            )
        return False

    def _hangs(self) -> bool:
        now = time.monotonic()
        if self._folder.num_calls != self._seen[0]:
            self._seen = self._folder.num_calls, now
        return now - self._seen[1] > self._silence


def wait_together(session: Session, operation: Operation, is_done: Callable[[], bool]) -> None:
    """Waits until it is done on every rank; each sees that the others live. Every rank calls it.

    Args:
        is_done: waits for a while, which is short beside the pipeline's ``timeout``.

    Raises:
        Exception: what ``is_done`` raised on any rank.
    """
    with session.ending.lost_ranks_close():
        for number in itertools.count():
            answers = session.agree(operation, number, lambda: Answer(is_done()))
            if all(rank.is_yes for rank in answers):
                return


def on_all_ranks(
    session: Session, folder: Folder, action: str, call: Callable[[], _Result]
) -> _Result:
    """Calls on every rank what works in the folder; returns what it gives here, or raises on all.

    One rank may take longer than the pipeline's ``timeout``: the others see that it lives.

    Raises:
        TimeoutError: a rank's file system hangs.
    """
    timeout = session.control.timeout
    made = FolderCall(folder, timeout, action, call)
    wait_together(session, Operation.use_folder, lambda: made.is_done(_SIGN_SHARE * timeout))
    return session.together(made.get)


def on_first_rank(
    session: Session, folder: Folder, action: str, call: Callable[[], _Result]
) -> _Result:
    """Calls on rank 0 what works in the folder; every rank returns what it gives, or raises."""
    of_rank: Callable[[], Any] = call if session.grid.rank == 0 else lambda: None
    found = on_all_ranks(session, folder, action, of_rank)
    with session.ending.lost_ranks_close():
        return cast(_Result, session.control.from_first(lambda: found))


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
