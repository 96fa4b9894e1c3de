"""A sample of :mod:`tests.device.prove`: what a training leaves out is found, or implied."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.device import checked
from tests.device.prove import FOUND, IMPLIED, TRAININGS, UNNEEDED, prove

WAIT, RECORD, HOST = (
    checked.Ordering.STREAM_WAIT,
    checked.Ordering.RECORD_STREAM,
    checked.Ordering.HOST_WAIT,
)


@pytest.mark.parametrize(
    ("name", "every", "needed"),
    [
        ("2bw, skips, clipping", 20, [WAIT, RECORD]),
        ("optimizer on the host", 12, [WAIT, RECORD, HOST]),
        ("graphs", 25, [WAIT, RECORD]),
    ],
)
def test_nothing_that_is_left_out_is_missed(
    name: str, every: int, needed: list[checked.Ordering]
) -> None:
    seen = {kind: Counter[str]() for kind in checked.Ordering.__members__.values()}
    for kind, n, word in prove(TRAININGS[name], every):
        assert word in (FOUND, IMPLIED, UNNEEDED), (kind, n, word)
        seen[kind][word] += 1
    for kind in needed:
        assert seen[kind][FOUND] > 0, kind
