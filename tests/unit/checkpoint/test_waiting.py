"""Whoever waits for other ranks' files gives up in time, and soon where they are gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pipedream2bw.checkpoint.waiting import Waiting


class Clock:
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def gives_up_after(clock: Clock, failed_at: float, written: Callable[[], int]) -> float:
    waiting = Waiting(60.0, lambda: clock.now >= failed_at, written)
    with pytest.raises(TimeoutError, match="nothing came"):
        while clock.now < 1000:
            waiting.look("nothing came")
    return clock.now


def test_it_waits_for_the_timeout_while_the_pipeline_is_open(clock: Clock) -> None:
    assert 60 < gives_up_after(clock, 1000, lambda: 0) < 62


def test_it_gives_up_soon_once_the_pipeline_has_failed_and_nobody_writes(clock: Clock) -> None:
    assert 12 < gives_up_after(clock, 10, lambda: 5) < 15


def test_it_waits_as_long_as_others_write(clock: Clock) -> None:
    assert 32 < gives_up_after(clock, 10, lambda: min(30, int(clock.now))) < 35
