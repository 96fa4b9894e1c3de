"""How often to save, so that training is slowed by no more than it may be.

CheckFreq's rule (Mohan et al., FAST 2021, section 4.3), with two differences. What a save costs is
measured end to end, in batches that took longer while it was under way. And the frequency is
corrected in both directions: by the median of the last three saves, and by a factor of at most two
at a time. Something else may have taken the time.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque

from ..checks import check_number, check_whole_number

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_FIRST_SAVE = 10
"""Batches before the first save whose cost is measured: their times are what others compare to."""


class Frequency:
    """Says after which batches to save.

    Args:
        every: a number of batches; a time, such as ``"10min"``; or ``"auto"``.
        max_overhead: with ``"auto"``, the share of the time that saving may add.

    Raises:
        ValueError, TypeError: naming the value and what it may be.
    """

    def __init__(self, every: int | str, max_overhead: float) -> None:
        check_number("max_overhead", max_overhead, below=1.0)
        self._max_overhead = max_overhead
        self.batches: int | None = None
        """Batches from one save to the next; None: not known yet, or by time."""
        self._seconds = math.inf
        self.is_auto = every == "auto"
        if isinstance(every, str):
            with_unit = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", every)
            if with_unit is not None:
                self._seconds = float(with_unit[1]) * _UNITS[with_unit[2]]
            elif not self.is_auto:
                raise ValueError(
                    f"every: {every!r}, it must be a number of batches, 'auto' or a time: '10min', "
                    "'90s', '1h'"
                )
        else:
            check_whole_number("every", every)
            self.batches = every
        self._since = 0  # batches since the last save began
        self._begun = time.monotonic()  # the last save
        self._undisturbed: deque[float] = deque(maxlen=50)  # seconds of batches
        self._disturbed: list[float] = []  # of those during the save under way
        self._added: deque[float] = deque(maxlen=3)  # seconds by the last saves

    @property
    def is_fixed(self) -> bool:
        """Whether a number of batches was given, which every rank knows."""
        return self.batches is not None and not self.is_auto

    def is_due(self) -> bool:
        """Whether to save after the batch that has just begun."""
        if self._seconds < math.inf:
            return time.monotonic() - self._begun >= self._seconds
        return self._since + 1 >= (self.batches or _FIRST_SAVE)

    def batch_ended(self, seconds: float | None, *, is_saving: bool) -> None:
        """Counts a batch.

        Args:
            seconds: how long it took; None: something else took a part of it.
            is_saving: whether a save was under way.
        """
        self._since += 1
        if seconds is not None:
            (self._disturbed if is_saving else self._undisturbed).append(seconds)

    def save_began(self) -> None:
        """Counts from here."""
        self._since = 0
        self._begun = time.monotonic()
        self._disturbed.clear()

    def save_ended(self, seconds: float) -> None:
        """Learns what a save cost, which took so many seconds until the checkpoint was whole."""
        if not self.is_auto or not self._undisturbed:
            return
        # The mean, as sums are compared: where batches are disturbed the median is less.
        period = max(statistics.fmean(self._undisturbed), 1e-9)
        added = max(0.0, sum(self._disturbed) - period * len(self._disturbed))
        self._added.append(min(added, seconds))  # more it cannot have cost
        added = statistics.median(self._added)
        least = max(1, math.ceil(seconds / period))  # one after the other
        if self.batches is None:
            self.batches = max(least, math.ceil(added / (self._max_overhead * period)))
            return
        overhead = added / (self.batches * period)
        if overhead > self._max_overhead:
            self.batches = math.ceil(self.batches * min(2.0, overhead / self._max_overhead))
        elif overhead < self._max_overhead / 2 and len(self._added) == 3:
            self.batches //= 2
        self.batches = max(self.batches, least)

    def state_dict(self) -> dict[str, int | None]:
        return {"batches": self.batches if self.is_auto else None}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        if self.is_auto:
            self.batches = state["batches"]
