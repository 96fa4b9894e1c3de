"""A sample of :mod:`tests.device.prove`: what a training leaves out is found, or implied."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.device import checked
from tests.device.prove import FOUND, IMPLIED, TRAININGS, prove


@pytest.mark.parametrize(("name", "every"), [("2bw, skips, clipping", 20), ("graphs", 25)])
def test_nothing_that_is_left_out_is_missed(name: str, every: int) -> None:
    seen = {kind: Counter[str]() for kind in checked.Ordering.__members__.values()}
    for kind, n, word in prove(TRAININGS[name], every):
        assert word in (FOUND, IMPLIED), (kind, n, word)
        seen[kind][word] += 1
    for kind in (checked.Ordering.STREAM_WAIT, checked.Ordering.RECORD_STREAM):
        assert seen[kind][FOUND] > 0, kind
