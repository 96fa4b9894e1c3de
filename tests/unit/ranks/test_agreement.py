"""Waiting for the other ranks, in slices so that a failure here ends it."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from pipedream2bw import _C
from pipedream2bw.errors import PeerLost
from pipedream2bw.ranks.boards import finish
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.operations import Operation
from pipedream2bw.ranks.peers import wait_for_all


class WorkOfOthers:
    """Completes as soon as a wait has ended without it; then `error` is what waiting raises."""

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.completed = False

    def wait(self, timeout: datetime.timedelta) -> None:
        if not self.completed:
            self.completed = True
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.completed


def wait_for(work: Any) -> _C.Fault:
    fault = _C.Fault()
    deadline = Deadline(60.0, fault)
    wait_for_all(lambda: finish(work), deadline, Operation.train_step, 3, "here")
    return fault


def test_work_that_completes_just_after_a_slice_of_waiting_has_not_failed() -> None:
    assert not wait_for(WorkOfOthers(None)).raised


def test_work_that_fails_just_after_a_slice_of_waiting_says_why() -> None:
    with pytest.raises(PeerLost, match=r"all ranks began train_step 3: Connection closed"):
        wait_for(WorkOfOthers("Connection closed by peer"))
