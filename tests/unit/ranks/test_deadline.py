"""Waiting for other processes ends by a deadline of its own, whatever the call does."""

from __future__ import annotations

import threading
import time

import pytest

from pipedream2bw import _C
from pipedream2bw.errors import PeerLost, PeerTimeout, StageError
from pipedream2bw.ranks.deadline import Deadline
from tests.runs.timed import at_most_three_times

never = threading.Event()


def fail(error: Exception) -> None:
    raise error


def test_what_the_call_gives_is_returned() -> None:
    assert Deadline(60.0, _C.Fault()).wait("adding", lambda: 1 + 1) == 2


@at_most_three_times
def test_a_call_that_never_returns_is_a_timeout_of_the_whole_process() -> None:
    fault = _C.Fault()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="adding: no answer") as raised:
        Deadline(0.2, fault).wait("adding", lambda: never.wait(10.0))
    assert time.monotonic() - start < 5.0
    assert raised.value.action == "adding"
    assert fault.raised


def test_a_failure_of_the_pipeline_ends_the_wait() -> None:
    fault = _C.Fault()
    threading.Timer(0.2, lambda: fault.raise_(StageError("stage 3 failed", stage=3))).start()
    with pytest.raises(StageError, match="stage 3 failed"):
        Deadline(60.0, fault).wait("adding", lambda: never.wait(10.0))


def test_a_connection_that_breaks_is_a_lost_peer() -> None:
    fault = _C.Fault()
    with pytest.raises(PeerLost, match="adding: connection closed by peer"):
        Deadline(60.0, fault).wait(
            "adding", lambda: fail(RuntimeError("connection closed by peer"))
        )
    assert fault.raised


def test_a_mistake_is_raised_as_it_is_and_is_no_failure() -> None:
    fault = _C.Fault()
    with pytest.raises(ValueError, match="a mistake"):
        Deadline(60.0, fault).wait("adding", lambda: fail(ValueError("a mistake")))
    assert not fault.raised
