"""Agreement among processes, and losses on their way, over each of the transports."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipedream2bw import _C
from pipedream2bw.errors import DamagedCheckpoint, ScheduleError, StageError
from pipedream2bw.ranks.agreement import ControlPlane
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.operations import Announcement, Operation
from tests.distributed.test_exactness import check, replicas_follow_the_mean
from tests.exhaustive import exhaustive
from tests.runs.launch import RankResult, run_ranks
from tests.runs.trajectory import sgd
from tests.runs.transports import GLOO, SHARED_MEMORY, TWO_MACHINES, over
from tests.samples.models import TASKS

SOON = 5.0
"""Seconds until waiting has ended; far less than the timeout of 60."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="has no memory to share")


def make(name: str, fault: _C.Fault | None = None, timeout: float = 60.0) -> ControlPlane:
    world = torch.distributed.get_world_size()
    return ControlPlane(world, Deadline(timeout, fault or _C.Fault()), f"test of {name}")


def attempt(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Type and text of what was raised, and after how many seconds."""
    start = time.monotonic()
    kind = text = ""
    try:
        call()
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - start


# ---------------------------------------------------------------- what the ranks run


def one_refuses(control: ControlPlane, rank: int, *, refusing: int, number: int) -> dict[str, Any]:
    """One rank refuses an operation, on which all agree afterwards."""

    def refuse() -> Announcement:
        if rank == refusing:
            raise TypeError("on purpose")
        return Announcement()

    return {
        "refused": attempt(lambda: control.agree(Operation.flush, number, refuse)),
        "after": control.agree(Operation.flush, number, lambda: Announcement(rank)),
    }


def agree(rank: int, world: int) -> dict[str, Any]:
    """Everything after which all ranks are still there."""
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    control = make("agreement")
    assert control.peers is not None
    seen["machines"] = control.peers.rows.machines
    seen["has a board of all"] = control.peers.board is not None

    def announce(number: int) -> list[Announcement]:
        if number % 50 == rank:
            time.sleep(0.01)
        mine = Announcement(
            rank, number, -(2**62) - rank, rank % 2, rank, number, number, rank, number
        )
        return control.agree(Operation.train_step, number, lambda: mine)

    seen["tables"] = [announce(number) for number in range(500)]

    seen |= one_refuses(control, rank, refusing=1, number=500)
    seen |= make_together(rank, control)
    operation = Operation.flush if rank == 0 else Operation.close
    seen["different"] = attempt(lambda: control.agree(operation, 501, Announcement))
    control.close()
    maps = Path("/proc/self/maps")
    seen["left"] = "pipedream2bw (" in maps.read_text() if maps.exists() else False

    # What ends waiting for ranks that do not come.
    control = make("interrupt")
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        seen["interrupt"] = attempt(lambda: control.agree(Operation.flush, 0, Announcement))
    torch.distributed.barrier()
    control.close()
    fault = _C.Fault()
    control = make("fault", fault)
    if rank == 0:
        failure = StageError("a stage failed", stage=3)
        threading.Timer(0.5, fault.raise_, (failure,)).start()
        seen["fault"] = attempt(lambda: control.agree(Operation.flush, 0, Announcement))
    torch.distributed.barrier()
    control.close()
    control = make("timeout", timeout=1.0)
    if rank == 0:
        seen["timeout"] = attempt(lambda: control.agree(Operation.flush, 7, Announcement))
    torch.distributed.barrier()
    control.close()
    make("a name used again").report(StageError("the failure before"))
    torch.distributed.barrier()
    fault = _C.Fault()
    control = make("a name used again", fault)
    time.sleep(1.2)  # ranks look for failures twice a second
    seen["failure before"] = str(fault.error)
    control.close()
    control = make("leaving")
    if rank == 1:
        time.sleep(0.5)
    else:
        seen["gone"] = attempt(lambda: control.agree(Operation.flush, 8, Announcement))
    control.close()
    return seen


def make_together(rank: int, control: ControlPlane) -> dict[str, Any]:
    def refuse(where: int) -> None:
        if rank == where:
            raise ValueError("on purpose")

    sizes = {"size": 5 + (rank == 1)}

    def refuse_a_schedule() -> None:
        if rank == 1:
            raise ScheduleError("no", rule="numbering", cell=(2, "steady", 3))

    def refuse_in_ways() -> None:
        if rank > 0:
            raise (PermissionError if rank == 1 else DamagedCheckpoint)("no")

    def with_data() -> tuple[str, Any]:
        try:
            control.together(refuse_a_schedule)
        except ScheduleError as error:
            return str(error), (error.rule, error.cell)
        return "", None

    return {
        "with data": with_data(),
        "own": control.together(lambda: rank, same={"size": 5}),
        "of the first": control.from_first(lambda: f"rank {rank}"),
        "one refuses": attempt(lambda: control.together(lambda: refuse(2))),
        "in two ways": attempt(lambda: control.together(refuse_in_ways)),
        "the first refuses": attempt(lambda: control.from_first(lambda: refuse(0))),
        "known settings": attempt(lambda: control.together(lambda: refuse(2), same=sizes)),
        "found settings": attempt(lambda: control.together(lambda: sizes, same=lambda made: made)),
    }


def lose_one(rank: int, world: int) -> tuple[str, str, float]:
    control = make("loss of a rank")
    control.place = f"rank {rank}"
    control.agree(Operation.train_step, 0, Announcement)
    if rank == 1:
        time.sleep(0.5)
        os._exit(7)
    return attempt(lambda: control.agree(Operation.train_step, 1, Announcement))


def one_cannot_reach_the_memory(rank: int, world: int) -> tuple[bool, list[Announcement]]:
    if rank == 1:
        _C.SharedBoard.open = staticmethod(lambda *args: None)  # type: ignore[method-assign]
    control = make("agreement")
    table = control.agree(Operation.flush, 0, lambda: Announcement(rank))
    is_shared = control.peers.board is not None
    control.close()
    return is_shared, table


def train(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    task = TASKS["skips"]
    for schedule, m in (("2bw", 4), ("pipedream", 1), ("chimera", 4)):
        check(task, 4, m, [2 * m] * 8, schedule=schedule)
    of_replicas = [task.batches([8] * 5, seed=10 + replica) for replica in range(2)]
    for schedule in ("2bw", "chimera"):
        replicas_follow_the_mean(task, of_replicas, sgd, 2, 4, schedule=schedule)


# ---------------------------------------------------------------- what they must have seen


@pytest.fixture(scope="module", params=[SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def results(request: pytest.FixtureRequest) -> tuple[str, list[RankResult]]:
    return request.param, run_ranks(over, 3, args=(request.param, agree), timeout=100)


Results = tuple[str, list[RankResult]]


@pytest.mark.slow
@on_linux
def test_memory_is_shared_where_it_can_be(results: Results) -> None:
    transport, ranks = results
    machines = {SHARED_MEMORY: [[0, 1, 2]], GLOO: [[0], [1], [2]], TWO_MACHINES: [[0, 2], [1]]}
    for result in ranks:
        assert result.value["machines"] == machines[transport]
        assert result.value["has a board of all"] == (transport == SHARED_MEMORY)


@pytest.mark.slow
def test_every_rank_gets_what_all_announced(results: Results) -> None:
    for result in results[1]:
        for number, table in enumerate(result.value["tables"]):
            want = [
                (rank, number, -(2**62) - rank, rank % 2, rank, number, number, rank, number, 0, -1)
                for rank in range(3)
            ]
            assert [tuple(row) for row in table] == want


@pytest.mark.slow
def test_failures_of_a_pipeline_of_the_same_name_before_are_not_heard_again(
    results: Results,
) -> None:
    assert [result.value["failure before"] for result in results[1]] == ["None"] * 3


@pytest.mark.slow
def test_a_mistake_of_one_rank_is_raised_by_all_and_they_go_on(results: Results) -> None:
    for result in results[1]:
        kind, text, _ = result.value["refused"]
        assert kind == "TypeError"
        assert text == ("" if result.rank == 1 else "rank 1: ") + "on purpose"
        assert [row[0] for row in result.value["after"]] == [0, 1, 2]


@pytest.mark.slow
def test_what_ranks_make_together_all_of_them_have_or_none(results: Results) -> None:
    for result in results[1]:
        seen = result.value
        assert (seen["own"], seen["of the first"]) == (result.rank, "rank 0")
        for name, where in (("one refuses", 2), ("the first refuses", 0)):
            place = "" if result.rank == where else f"rank {where}: "
            assert seen[name][:2] == ("ValueError", f"{place}on purpose")
        place = "" if result.rank == 1 else "rank 1: "
        kind = "PermissionError" if result.rank == 1 else "OSError"
        assert seen["in two ways"][:2] == (kind, f"{place}no")
        assert seen["with data"] == (f"{place}no", ("numbering", (2, "steady", 3)))
        for name in ("known settings", "found settings"):
            kind, text, _ = seen[name]
            assert kind == "ValueError"
            assert text == (
                "size must be the same on every rank, got rank 0: 5, rank 1: 6, rank 2: 5"
            )


@pytest.mark.slow
def test_ranks_that_call_different_operations_all_learn_it(results: Results) -> None:
    for result in results[1]:
        kind, text, _ = result.value["different"]
        assert kind == "StageError"
        assert "rank 0: flush 501, rank 1: close 501, rank 2: close 501" in text


@pytest.mark.slow
def test_closing_gives_the_memory_back(results: Results) -> None:
    assert not any(result.value["left"] for result in results[1])


@pytest.mark.slow
def test_an_interrupt_and_a_failure_here_end_waiting_for_other_ranks(results: Results) -> None:
    seen = results[1][0].value
    kind, _, seconds = seen["interrupt"]
    assert kind == "KeyboardInterrupt"
    assert seconds < SOON
    kind, text, seconds = seen["fault"]
    assert (kind, text) == ("StageError", "a stage failed")
    assert seconds < SOON


@pytest.mark.slow
def test_waiting_for_a_rank_that_never_comes_ends_after_the_timeout(results: Results) -> None:
    kind, text, seconds = results[1][0].value["timeout"]
    assert kind == "PeerTimeout"
    assert "here: a rank was lost while all ranks began flush 7: timeout after 1.0 s" in text
    assert seconds < SOON


@pytest.mark.slow
def test_waiting_for_a_rank_that_has_closed_ends(results: Results) -> None:
    transport, ranks = results
    for result in ranks[::2]:
        kind, text, seconds = result.value["gone"]
        assert kind == "PeerLost"
        assert "a rank was lost while all ranks began flush 8: " in text
        assert seconds < SOON
    if transport == SHARED_MEMORY:
        texts = [result.value["gone"][1] for result in ranks[::2]]
        assert any("rank 1 has left the pipeline" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def test_a_lost_rank_is_noticed_by_all_that_wait_for_it(transport: str) -> None:
    results = run_ranks(over, 3, args=(transport, lose_one), timeout=60, expect_failure=True)
    assert [result.exit_code for result in results] == [0, 7, 0]
    for result in (results[0], results[2]):
        kind, text, seconds = result.value
        assert kind == "PeerLost"
        assert f"rank {result.rank}: a rank was lost while all ranks began train_step 1: " in text
        assert seconds < SOON


@pytest.mark.slow
def test_all_use_gloo_if_one_rank_cannot_reach_the_memory() -> None:
    for result in run_ranks(one_cannot_reach_the_memory, 3):
        is_shared, table = result.value
        assert not is_shared
        assert [row[0] for row in table] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def test_losses_of_pipelines_and_replicas_are_those_of_the_unsplit_model(transport: str) -> None:
    run_ranks(over, 4, args=(transport, train), timeout=150)
