"""The benchmark of saves sees a stop that is short beside the batches between two saves."""

from __future__ import annotations

import pytest

from benchmarks.measuring.groups import Group, figures_of_idleness, note_idleness
from pipedream2bw.schedules.events import Event


def test_a_stop_in_one_of_ten_batches_is_seen_in_the_batches_that_the_save_takes() -> None:
    groups = [Group("none", [1.0] * 10, 0.0), Group("saving", [1.0] * 9 + [1.3], 0.0, 2)]
    events, now = [], 0.0
    for batch in range(21):
        events.append(Event(0, 0, "F", batch, 0, 0, now, now + 0.9))
        stop = 0.3 if batch == 11 else 0.0  # the second of the group with the save
        now += 1.0 + stop
    note_idleness(groups, events, first=0)
    over_all, around = figures_of_idleness("", [[groups]])
    assert over_all.values == pytest.approx([1.3 / 10.3 - 0.1])
    assert around.values == pytest.approx([0.5 / 2.3 - 0.1])
    assert around.verdict == "MISS"
