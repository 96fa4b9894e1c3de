"""The microbatches and bytes that stages hold are those that the simulator foretells."""

from __future__ import annotations

import pytest

import pipedream2bw as pd2
from tests.runs.memory_in_flight import assert_as_simulated
from tests.samples.schedule_sizes import sizes_for


@pytest.mark.parametrize("num_stages", range(2, 7))
@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_stages_hold_what_the_simulator_says(schedule: str, num_stages: int) -> None:
    for sizes in sizes_for(schedule, num_stages):
        assert_as_simulated(schedule, sizes)
