"""Under processes, too, a batch in which the user's code fails costs that batch alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runs.discarding import Failure, Outcome, batches, by_oracle, train
from tests.runs.launch import run_ranks
from tests.runs.trajectory import assert_same_state
from tests.runs.transports import SHARED_MEMORY, TRANSPORTS, over

M, ROWS, COUNT = 4, 8, 8
CASES = [
    ("2bw", "forward", 0, 0),
    ("2bw", "forward", 1, 3 * M + 1),
    ("2bw", "backward", 0, 2 * M + 3),
    ("2bw", "hook", 1, 5 * M),
    ("1f1b", "backward", 0, 3 * M + 2),
    ("1f1b", "forward", 1, 7 * M + 3),
]
WITH_SHARED_MEMORY = ("pipedream", "forward", 1, 4)
"""Without it a stage may make its update before it knows."""


def cases_over(transport: str) -> list[tuple[str, str, int, int]]:
    return [*CASES, WITH_SHARED_MEMORY] if transport == SHARED_MEMORY else CASES


def two_ranks(rank: int, world: int, transport: str) -> list[Outcome]:
    given = batches(COUNT, ROWS)
    return [
        train(
            given,
            [Failure(layer, kind, call)],
            num_stages=2,
            num_microbatches=1 if schedule == "pipedream" else M,
            schedule=schedule,
            norm=schedule != "pipedream",
        )
        for schedule, kind, layer, call in cases_over(transport)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_batch_that_fails_is_as_if_it_had_not_been(transport: str) -> None:
    given = batches(COUNT, ROWS)
    results = run_ranks(over, 2, args=(transport, two_ranks, transport), timeout=150)
    for number, (schedule, *_) in enumerate(cases_over(transport)):
        outcomes: list[Any] = [result.value[number] for result in results]
        first, second = outcomes
        assert first.kept == second.kept
        assert [e.discarded for e in first.errors] == [e.discarded for e in second.errors] != []
        state: dict[str, torch.Tensor] = {**first.state, **second.state}
        want = by_oracle(
            given,
            first,
            num_stages=2,
            num_microbatches=1 if schedule == "pipedream" else M,
            delay=[1, 1, 0, 0] if schedule == "pipedream" else int(schedule == "2bw"),
            norm=schedule != "pipedream",
        )
        for outcome in outcomes:
            assert outcome.losses == want.losses, (schedule, number)
        assert_same_state(state, want.state)
