"""A rank that stops without ending, as of a machine that hangs, ends all others by a deadline."""

from __future__ import annotations

import pytest

from tests.exhaustive import exhaustive
from tests.runs.stopping import Case, survivors_of
from tests.runs.timed import at_most_three_times
from tests.runs.transports import GLOO, SHARED_MEMORY

# Rank 0 has the store to which failures are told. All cases: python -m tests.stop_and_kill
CASES = [
    Case("2bw", 3, 1, 0, "SIGSTOP", "training", SHARED_MEMORY, delay=0.1, tidy=False),
    Case("1f1b", 2, 1, 0, "SIGSTOP", "opening", GLOO, delay=0.02),
    Case("chimera", 2, 1, 0, "SIGSTOP", "state_dict", SHARED_MEMORY, delay=0.1, tidy=False),
    Case("2bw", 2, 2, 1, "SIGSTOP", "training", GLOO, delay=0.1, clips=True),
    Case("2bw", 2, 1, 0, "SIGSTOP", "save", SHARED_MEMORY, delay=0.1),
    Case("2bw_v_half", 3, 1, 1, "SIGSTOP", "closing", GLOO, delay=0.02, clips=True),
    *exhaustive(
        Case("2bw", 3, 1, 2, "SIGSTOP", "evaluation", GLOO, delay=0.1),
        Case("2bw", 3, 1, 2, "SIGSTOP", "making a Checkpointer", GLOO, delay=0.1),
        Case("2bw", 2, 1, 0, "SIGSTOP", "resume", SHARED_MEMORY, delay=0.02),
        Case("2bw", 2, 1, 1, "SIGKILL", "closing", SHARED_MEMORY, delay=0.001),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.sent}-{case.moment}-{case.victim}")
@at_most_three_times
def test_all_others_end_soon_after_the_timeout_with_an_error_that_says_so(case: Case) -> None:
    for survivor in survivors_of(case):
        assert survivor.is_typed(), survivor
        assert survivor.ended < case.limit, survivor
