"""Several machines: ranks agree in memory within each, and by one rank of each between them.

The machines are pretended. Ranks alternate between them: so a table put together wrongly shows.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipedream2bw.ranks.operations import Announcement, Operation
from tests.distributed.test_clipping import check as clips_as_unsplit
from tests.distributed.test_control import SOON, attempt, make, on_linux, one_refuses
from tests.runs.discarding import Failure, Outcome, batches, train
from tests.runs.launch import run_ranks
from tests.runs.trajectory import assert_same_state
from tests.runs.transports import be_on_machine

pytestmark = [pytest.mark.slow, on_linux]

PLACES = [0, 1, 0, 2, 1, 0]
MACHINES = [[0, 2, 5], [1, 4], [3]]
TIMEOUT = 3.0


def on_machines(rank: int, world: int, run: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(1)
    be_on_machine(PLACES[rank])
    return run(rank, world, *args)


def agree(rank: int, world: int) -> dict[str, Any]:
    control = make("machines")
    assert control.peers is not None
    seen: dict[str, Any] = {"machines": control.peers.rows.machines}
    assert control.peers.board is None  # losses and verdicts go to other machines too
    assert control.peers.verdict_board is None
    late = random.Random(rank)

    def announce(number: int) -> list[Announcement]:
        if late.random() < 0.05:
            time.sleep(0.005)
        return control.agree(Operation.train_step, number, lambda: Announcement(rank, number))

    seen["tables"] = [announce(number) for number in range(300)]

    seen |= one_refuses(control, rank, refusing=4, number=300)
    control.close()
    return seen


def test_every_rank_gets_the_rows_of_all_machines() -> None:
    for result in run_ranks(on_machines, 6, args=[agree], timeout=100):
        seen = result.value
        assert seen["machines"] == MACHINES
        for number, table in enumerate(seen["tables"]):
            assert [row[:2] for row in table] == [(rank, number) for rank in range(6)]
        kind, text, _ = seen["refused"]
        assert kind == "TypeError"
        assert text == ("" if result.rank == 4 else "rank 4: ") + "on purpose"
        assert [row[0] for row in seen["after"]] == list(range(6))


def discard(rank: int, world: int) -> tuple[Outcome, Outcome]:
    """Two replicas; one's second stage, on a machine's second rank, fails once."""
    given = batches(8, 8)
    settings: dict[str, Any] = {"num_stages": 3, "num_microbatches": 4, "width": 2}
    settings["optimizer_options"] = {"max_grad_norm": 0.05}
    failures = [Failure(1, "backward", 14)] if rank == 4 else []
    got = train(given, failures, **settings)
    kept = [given[position] for position in got.kept]
    return got, train(kept, [], restarts=got.restarts, **settings)


def test_a_batch_that_fails_on_a_machine_is_discarded_by_all() -> None:
    for result in run_ranks(on_machines, 6, args=[discard], timeout=100):
        got, want = result.value
        (error,) = got.errors
        assert "on purpose" in str(error)
        assert error.stage == 1
        assert error.discarded
        assert got.losses == want.losses
        assert_same_state(got.state, want.state)


def clip(rank: int, world: int) -> None:
    clips_as_unsplit(2, "2bw", 3)
    clips_as_unsplit(1, "chimera", 6)


def test_norms_and_losses_of_machines_are_those_of_the_unsplit_model() -> None:
    run_ranks(on_machines, 6, args=[clip], timeout=150)


def lose(rank: int, world: int, lost: int, how: int) -> tuple[str, str, float]:
    control = make("loss of a rank", timeout=TIMEOUT)
    for number in range(3):
        control.agree(Operation.train_step, number, Announcement)
    if rank == lost:
        time.sleep(0.3)
        if how == signal.SIGSTOP:  # all others end first; then the test's processes are ended
            time.sleep(TIMEOUT + 3)
            return "", "", 0.0
        os._exit(7)
    seen = attempt(lambda: control.agree(Operation.train_step, 3, Announcement))
    again = attempt(lambda: control.agree(Operation.train_step, 4, Announcement))
    assert again[2] < SOON
    assert again[0] == seen[0], again
    return seen


@pytest.mark.parametrize("lost", [0, 1, 3, 4], ids=["first leader", "leader", "alone", "member"])
def test_a_lost_rank_is_noticed_on_all_machines(lost: int) -> None:
    results = run_ranks(
        on_machines, 6, args=[lose, lost, signal.SIGKILL], timeout=60, expect_failure=True
    )
    for result in results:
        if result.rank == lost:
            assert result.exit_code == 7
            continue
        kind, text, seconds = result.value
        assert kind == "PeerLost", text
        assert seconds < SOON
    on_its_machine = [rank for rank in MACHINES[PLACES[lost]] if rank != lost]
    texts = [results[rank].value[1] for rank in on_its_machine]
    assert all(f"rank {lost} has ended or left" in text for text in texts[:1])


@pytest.mark.parametrize("lost", [1, 4], ids=["leader", "member"])
def test_a_silent_rank_is_a_timeout_on_all_machines(lost: int) -> None:
    for result in run_ranks(on_machines, 6, args=[lose, lost, signal.SIGSTOP], timeout=60):
        kind, text, seconds = result.value
        if result.rank != lost:
            assert kind in ("PeerTimeout", "PeerLost"), text
            assert seconds < TIMEOUT + 3
