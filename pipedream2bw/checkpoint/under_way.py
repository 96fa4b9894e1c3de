"""A save under way, as the user sees it."""

from __future__ import annotations

import math
import time
import weakref
from concurrent.futures import Future

from ..checks import check_number
from ..ranks.agreement import Announcement, Operation
from ..runtime.session import Session
from .waiting import done_by


class Saving:
    """A save under way.

    Attributes:
        step: of the checkpoint: the number of the batch that follows.
        snapshot: done when this process's state has been copied. Under ``"2bw"`` that is in the
            next batch, or at the next drain.
        done: when the checkpoint is whole, on every rank. Its exception says why it never will be.
    """

    def __init__(self, session: Session, path: str, step: int) -> None:
        self.step = step
        self.snapshot: Future[None] = Future()
        self.done: Future[None] = Future()
        self.seconds: dict[str, float] = {}
        """How long each part took: ``snapshot``, ``write``, ``commit``."""
        self._session = weakref.ref(session)
        self._path = path
        self._timeout = session.control.timeout

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is whole. Drains; every rank calls it.

        Args:
            timeout: seconds, after the drain; None: the pipeline's.

        Raises:
            OSError, RuntimeError: it could not be written; the pipeline has failed.
            TimeoutError: it takes longer, as where the file system hangs. It may yet become whole.
            TypeError, ValueError: ``timeout`` is no positive, finite number.
        """

        def check() -> Announcement:
            if timeout is not None:
                check_number("timeout", timeout, below=math.inf)
            return Announcement()

        session = self._session()
        if session is not None and session.ending.is_open:
            session.flush_for(Operation.flush, check)
        else:
            check()
        seconds = self._timeout if timeout is None else timeout
        if not done_by(self.done, time.monotonic() + seconds):
            raise self.too_long(seconds)
        self.done.result()

    def too_long(self, seconds: float | None = None) -> TimeoutError:
        """Says that it has not ended within so many seconds, or those of the pipeline."""
        seconds = self._timeout if seconds is None else seconds
        return TimeoutError(f"{self._path}: checkpoint {self.step} took more than {seconds:g} s")
