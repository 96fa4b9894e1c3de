"""Waiting for what other processes write into the folder."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_SECONDS = 0.02
_FAILED_SECONDS = 2.0
"""Without a byte more of other processes, once the pipeline has failed."""


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
