"""Frozen weights that saves under way read where they are."""

from __future__ import annotations

from concurrent.futures import Future, wait


class FrozenInUse:
    """Knows until when the frozen weights of this process must not change."""

    def __init__(self) -> None:
        self._until: list[Future[None]] = []

    def until(self, done: Future[None]) -> None:
        """They must not change until a save is done."""
        self._until = [each for each in self._until if not each.done()]
        self._until.append(done)

    def wait(self, seconds: float) -> None:
        """Waits until they may change.

        Raises:
            TimeoutError: a save takes longer.
        """
        if wait(self._until, seconds).not_done:
            raise TimeoutError(
                f"load: a save under way has not ended within {seconds:g} s: it reads frozen "
                "weights, which must not change until then"
            )
