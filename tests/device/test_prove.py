"""A sample of :mod:`tests.device.prove`: what a training leaves out is found, or implied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.device import checked
from tests.device.prove import one_process, two_processes
from tests.device.prove.outcomes import FOUND, IMPLIED, UNNEEDED, Outcome

WAIT, RECORD, HOST = (
    checked.Ordering.STREAM_WAIT,
    checked.Ordering.RECORD_STREAM,
    checked.Ordering.HOST_WAIT,
)


@pytest.mark.parametrize(
    ("name", "every", "needed"),
    [
        ("2bw, skips, clipping", 30, [WAIT, RECORD]),
        ("optimizer on the host", 18, [WAIT, RECORD, HOST]),
        ("graphs", 37, [WAIT, RECORD]),
        ("saves", 37, [WAIT]),
    ],
)
def test_nothing_that_is_left_out_is_missed(
    name: str, every: int, needed: list[checked.Ordering]
) -> None:
    check(one_process.prove(one_process.TRAININGS[name], every), needed)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("two processes, rings", 15),
        ("two processes, staged", 7),
        ("two replicas, shared state", 25),
    ],
)
def test_nothing_that_one_of_two_processes_leaves_out_is_missed(name: str, every: int) -> None:
    check(two_processes.prove(name, every, timeout=90.0), [WAIT])


def check(outcomes: Iterable[Outcome], needed: list[checked.Ordering]) -> None:
    seen = {kind: Counter[str]() for kind in checked.Ordering.__members__.values()}
    for kind, n, word in outcomes:
        assert word in (FOUND, IMPLIED, UNNEEDED), (kind, n, word)
        seen[kind][word] += 1
    for kind in needed:
        assert seen[kind][FOUND] > 0, kind
