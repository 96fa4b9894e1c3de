"""Messages between processes through memory of a device that both use."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw import _C
from pipedream2bw.errors import StageError
from pipedream2bw.ranks import channels
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.rings import make_device_ring
from tests.device import checked
from tests.device.on_device import batch_on, on
from tests.gpu_check.training import Case, by_definition, sgd
from tests.runs.launch import run_ranks
from tests.runs.timed import at_most_three_times
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_pipeline,
    expected,
    make_pipeline,
)
from tests.samples.models import TASKS

DEVICE = torch.device("checked:0")
SLOTS = 2
COUNT = 14
# One after the other, layouts of which each needs larger slots than those before.
SIZES = (5, 5, 3000, 5, 70_000, 3000, 200_000)


def ring_ends() -> Any:
    hosts = dist.new_group(backend="gloo")
    assert hosts is not None
    ring = make_device_ring(hosts, (0, 1), DEVICE, SLOTS, Deadline(30.0, _C.Fault()))
    assert ring is not None
    assert ring.rank == 1 - dist.get_rank()
    return ring.end


def exchange(rank: int, sizes: tuple[int, ...]) -> list[bool]:
    """Rank 0 sends what it computes, and its memory is used again; says what has arrived."""
    end = ring_ends()
    right = []
    received = []
    for number in range(COUNT):
        layout = number % len(sizes)
        size = sizes[layout]
        if rank == 0:
            short = torch.full([3], number, device=DEVICE, dtype=torch.int16) * 2
            end.send(layout, [short, (torch.ones(2, size, device=DEVICE) + number).t()])
        else:
            end.expect(layout)
            received.append((number, size, end.receive()))
    for number, size, (short, floats) in received:
        assert floats.device == DEVICE
        assert floats.stride() == (1, size)
        same = (floats.cpu() == torch.full([size, 2], number + 1.0)).all().item()
        right.append(short.tolist() == [2 * number] * 3 and same)
    dist.barrier()
    return right


def exchange_of_layouts(rank: int, world: int) -> None:
    with checked.expect_no_errors():
        assert all(exchange(rank, SIZES))
        checked.set_drains(at_first_use=True, probability=0.1, seed=rank)
        assert all(exchange(rank, SIZES))


def test_messages_arrive_in_order_and_without_a_race() -> None:
    run_ranks(exchange_of_layouts, 2, timeout=60)


def exchange_without_a_wait(rank: int, world: int) -> None:
    # The first use of each operator waits until the device has come to rest.
    for faulty, first in ((1, 4), (0, 5)):
        # The one that waits is fast, and the other one slow.
        checked.set_sharing_delay(0.0 if rank == faulty else 0.05)
        checked.drop_nth(checked.Ordering.PEER_WAIT, first if rank == faulty else 0)
        right = exchange(rank, (5,))
        assert rank == 0 or not all(right), f"a wait that rank {faulty} left out"
        checked.clear_errors()


def test_each_wait_for_the_other_process_is_needed() -> None:
    run_ranks(exchange_without_a_wait, 2, timeout=60)


def leave_at_once(rank: int, world: int) -> None:
    """Both drop their ends while one of the devices has not done what it was given."""
    numbers = range(1, 2 * SLOTS + 1)
    for slow in (0, 1):
        checked.set_sharing_delay(0.05 if rank == slow else 0.0)
        end = ring_ends()
        received = []
        for number in numbers:
            if rank == 0:
                end.send(0, [torch.full([8], number, device=DEVICE)])
            else:
                end.expect(0)
                received.append(end.receive()[0])
        del end
        want = [torch.full([8], number).tolist() for number in numbers if rank == 1]
        assert [tensor.tolist() for tensor in received] == want, f"rank {slow} is slow"


def test_ends_that_are_dropped_lose_no_message() -> None:
    run_ranks(leave_at_once, 2, timeout=60)


def again(call: Callable[[], Any]) -> Any:
    """What it gives, at the second time if the first one finds a race."""
    try:
        return call()
    except RuntimeError:
        return call()


def exchange_with_races(rank: int, end: Any) -> None:
    """Memory is used again at once by both sides."""
    for number in range(5):

        def send(number: int = number) -> None:
            end.send(0, [torch.ones(300, device=DEVICE) * number])

        def receive() -> Any:
            end.expect(0)
            return end.receive()[0]

        if rank == 0:
            again(send)
        else:
            received = again(receive)
            with contextlib.suppress(RuntimeError):
                received.mul(2)
            del received
        with contextlib.suppress(RuntimeError):
            torch.zeros(300, device=DEVICE) + 1
    torch.accelerator.synchronize()


def exchange_without_one(rank: int, world: int, kind: checked.Ordering) -> int:
    end = ring_ends()
    exchange_with_races(rank, end)  # first uses
    checked.clear_errors()
    checked.drop_nth(kind, 0)
    exchange_with_races(rank, end)
    num_found = 0
    assert not checked.errors()
    counts: list[Any] = [None, None]
    dist.all_gather_object(counts, checked.count(kind))
    for faulty in (0, 1):
        for n in range(1, counts[faulty] + 1):
            checked.drop_nth(kind, n if rank == faulty else 0)
            for _ in range(2):  # the last message's memory is used again in the second one
                exchange_with_races(rank, end)
            if rank == faulty:
                is_open = checked.verdict() in (None, checked.Verdict.OPEN)
                assert checked.errors() or not is_open, (kind, faulty, n)
                num_found += bool(checked.errors())
            checked.clear_errors()
            dist.barrier()
    assert num_found > 0
    return num_found


@pytest.mark.parametrize("kind", ["STREAM_WAIT", "RECORD_STREAM"])
def test_each_wait_and_record_of_a_stream_is_needed(kind: str) -> None:
    run_ranks(exchange_without_one, 2, args=[getattr(checked.Ordering, kind)], timeout=90)


def check(name: str, m: int, schedule: str = "2bw") -> None:
    """Every rank compares the losses, and the parameters that it holds."""
    task, world = TASKS[name], dist.get_world_size()
    rows = [2 * m] * 5
    batches = task.batches(rows)
    want = expected(task, rows, m, schedule=schedule)
    got = by_pipeline(
        on(task, str(DEVICE)),
        batches,
        world,
        m,
        example=batch_on(batches[0], str(DEVICE)),
        schedule=schedule,
    )
    on_host = {name: tensor.cpu() for name, tensor in got.state.items()}
    held = {name: want.state[name] for name in on_host}
    assert_same(
        Trajectory(got.losses, on_host), dataclasses.replace(want, state=held), exact=task.exact
    )


class Ends(channels.Channels):
    """All of which are ends of rings between devices."""

    def make(self, edges: Any) -> None:
        super().make(edges)
        between = [*self.senders.values(), *self.receivers.values()]
        assert between
        assert all(isinstance(e, (_C.DeviceRingSender, _C.DeviceRingReceiver)) for e in between)


def train(rank: int, world: int) -> None:
    with (
        checked.expect_no_errors(),
        mock.patch("pipedream2bw.runtime.local_stages.Channels", Ends),
    ):
        for schedule in ("2bw", "1f1b"):
            check("mlp", world + 1, schedule)
        check("skips", world, "2bw")
        checked.set_drains(at_first_use=True, probability=0.02, seed=rank)
        check("drawing", world, "2bw")


@pytest.mark.parametrize("world", [2, 3])
def test_processes_on_one_device_train_as_the_oracle(world: int) -> None:
    run_ranks(train, world, timeout=120, rank_environment=True)


class Mixed(channels.Channels):
    """One of whose two directions is a ring."""

    def make(self, edges: Any) -> None:
        super().make(edges)
        rings = [
            isinstance(end, (_C.DeviceRingSender, _C.DeviceRingReceiver))
            for end in (*self.senders.values(), *self.receivers.values())
        ]
        assert sorted(rings) == [False, True]


def train_in_another_way(rank: int, world: int, what: str) -> None:
    """Rank 1 cannot share memory, but only as one of the two ends."""
    ends = {"create": _C.DeviceRingSender, "open": _C.DeviceRingReceiver}
    with (
        checked.expect_no_errors(),
        mock.patch.object(ends[what], what, return_value=None)
        if rank == 1
        else contextlib.nullcontext(),
        mock.patch("pipedream2bw.runtime.local_stages.Channels", Mixed),
    ):
        check("mlp", 2)


@pytest.mark.parametrize("what", ["create", "open"])
def test_where_one_end_cannot_share_memory_both_go_another_way(what: str) -> None:
    run_ranks(train_in_another_way, 2, args=[what], timeout=60, rank_environment=True)


def train_with_nccl(rank: int, world: int) -> None:
    """As if the process group's backend were NCCL, which needs a device for each process."""
    nccl = {"cpu": "gloo", "checked": "nccl"}
    with (
        mock.patch("pipedream2bw.ranks.devices.backends_of", return_value=nccl),
        pytest.raises(ValueError, match=r"rank 0: checked:0 .*rank 1: .*this is one device, and"),
    ):
        check("mlp", 2)


def test_ranks_with_one_device_are_refused_with_nccl() -> None:
    run_ranks(train_with_nccl, 2, timeout=60, rank_environment=True)


def train_without_local_rank(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"this is one device of the 4 .*: without LOCAL_RANK"):
        check("mlp", 2)


def test_ranks_without_local_rank_have_to_choose_their_devices() -> None:
    run_ranks(train_without_local_rank, 2, timeout=60)


LOST = ("kill", "kill with a device at work", "leave")


def fail(rank: int, world: int, how: str, case: Case) -> float:
    """How long the survivors need to learn it; what they have then is of some version."""
    task, m = TASKS["mlp"], case.num_microbatches
    (batch,) = task.batches([2 * m])
    there = batch_on(batch, str(DEVICE))
    left = m if how == "kill with a device at work" else -1

    def loss_fn(*args: Any) -> torch.Tensor:
        nonlocal left
        if trains:
            left -= 1
        if left == 0:  # of the batch's last microbatch: its gradient never comes
            checked.set_sharing_delay(60.0)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return task.loss_fn(*args)

    trains = False
    pipe = make_pipeline(
        dataclasses.replace(on(task, str(DEVICE)), loss_fn=loss_fn),
        world,
        m,
        there,
        schedule=case.schedule,
        precision=case.precision,
    )
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for _ in range(3):
            pipe.train_step(*there.args, target=there.target)
            opt.step()
        pipe.flush()
        trains = True
        dist.barrier()
        start = time.monotonic()
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "leave":
            pipe.abort()
            return 0.0
        with pytest.raises(StageError):
            for _ in range(20):
                pipe.train_step(*there.args, target=there.target)
                opt.step()
            pipe.flush()
        seconds = time.monotonic() - start
        state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
    versions = [by_definition(task, [batch] * n, case).state for n in range(1, 24)]
    assert any(all(each[name].equal(state[name]) for name in state) for each in versions)
    assert seconds < 5, seconds
    return seconds


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(num_microbatches=4)),
        (3, Case(num_microbatches=4, precision="bf16")),
        (2, Case(num_microbatches=1, schedule="1f1b")),
        (2, Case(num_microbatches=2, precision="bf16")),
    ],
    ids=str,
)
@at_most_three_times
def test_a_lost_peer_ends_all_waiting(how: str, world: int, case: Case) -> None:
    results = run_ranks(
        fail,
        world,
        args=[how, case],
        timeout=60,
        rank_environment=True,
        expect_failure=how != "leave",
    )
    for result in results:
        killed = result.rank == {"kill": 1, "leave": None}.get(how, world - 1)
        assert result.exit_code == (-signal.SIGKILL if killed else 0), str(result)
