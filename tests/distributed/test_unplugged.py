"""A rank whose packets are all lost from now on, as of a machine that vanishes, ends all others."""

from __future__ import annotations

import os

import pytest

from tests.exhaustive import exhaustive
from tests.runs.network import switch
from tests.runs.stopping import UNPLUGGED, Case, survivors_of
from tests.runs.timed import at_most_three_times
from tests.runs.transports import GLOO

# Rank 0 has the store to which failures are told.
CASES = [
    Case("2bw", 2, 1, 1, UNPLUGGED, "training", GLOO, delay=0.1, tidy=False),
    Case("2bw", 3, 1, 0, UNPLUGGED, "training", GLOO, delay=0.05, clips=True),
    *exhaustive(
        Case("2bw", 2, 1, 0, UNPLUGGED, "training", GLOO, delay=0.1),
        Case("2bw", 3, 1, 1, UNPLUGGED, "training", GLOO, delay=0.1),
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _namespaces_can_be_made() -> None:
    try:
        with switch():
            return
    except OSError as error:
        if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") == "1":
            raise
        pytest.skip(f"no network of its own can be made: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.depth}-{case.victim}")
@at_most_three_times
def test_all_ranks_end_soon_after_the_timeout_when_the_packets_of_one_are_dropped(
    case: Case,
) -> None:
    for survivor in survivors_of(case):
        assert survivor.kind in ("PeerLost", "PeerTimeout"), survivor
        assert survivor.is_typed(), survivor
        # Nobody was told: a connection that breaks ends the others at once.
        assert survivor.raised > 0.8 * case.timeout, survivor
        assert survivor.ended < case.limit, survivor
