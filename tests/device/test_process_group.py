"""The process group "checked" orders, waits and hangs as NCCL's does."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import checked
from tests.device.races import recorded, stream
from tests.runs.launch import run_ranks

SECONDS = 30.0
Program = Callable[[int, Any], Any]


def in_threads(program: Program, *, size: int = 2, devices: list[int] | None = None) -> list[Any]:
    """What the program returns on each rank: a thread with a device and a group of its own."""
    store = dist.HashStore()
    all_ended = threading.Barrier(size)

    def run(rank: int) -> Any:
        torch.accelerator.set_device_index((devices or list(range(size)))[rank])
        timeout = datetime.timedelta(seconds=SECONDS)
        group: Any = checked.make_process_group(store, rank, size, timeout)
        try:
            value = program(rank, group)
            all_ended.wait(SECONDS)  # to abort it would end what others wait for
            return value
        except BaseException:
            all_ended.abort()
            raise
        finally:
            group.abort()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        return [future.result() for future in futures]


def full(value: float, *, size: int = 10) -> torch.Tensor:
    return torch.full((size,), float(value), device="checked")


def connect(rank: int, group: Any) -> None:
    """Makes the connection between two ranks: its first message waits for both."""
    if rank == 0:
        group.send([full(0.0)], 1, 0)
    else:
        group.recv([full(0.0)], 0, 0).wait()


# --- what it computes


def test_messages_come_in_order() -> None:
    def program(rank: int, group: Any) -> list[float]:
        tensors = [full(10 * rank + i) for i in range(3)]
        for tensor in tensors:
            if rank == 0:
                group.send([tensor], 1, 0)
            else:
                group.recv([tensor], 0, 0).wait()
        torch.accelerator.synchronize()
        return [tensor[3].item() for tensor in tensors]

    assert in_threads(program) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int) -> None:
    def program(rank: int, group: Any) -> dict[str, list[float]]:
        found = {}
        x = full(rank + 1.0)
        group.allreduce([x]).wait()
        found["all-reduce"] = x[:1].tolist()
        x = full(rank + 1.0)
        group.allreduce([x], dist.ReduceOp.MAX).wait()
        found["max"] = x[:1].tolist()
        x = full(rank + 1.0)
        group.broadcast(x, size - 1).wait()
        found["broadcast"] = x[:1].tolist()
        outputs = [full(0.0) for _ in range(size)]
        group.allgather([outputs], [full(rank + 1.0)]).wait()
        found["all-gather"] = [output[9].item() for output in outputs]
        y = full(0.0, size=2 * size)
        group._allgather_base(y, full(rank + 1.0, size=2)).wait()
        found["all-gather base"] = y[::2].tolist()
        pieces = [full(10.0 * rank + to, size=to + 1) for to in range(size)]
        y = full(0.0, size=size * (rank + 1))
        sizes = [rank + 1] * size, [piece.numel() for piece in pieces]
        group.alltoall_base(y, torch.cat(pieces), *sizes).wait()
        found["all-to-all"] = y.tolist()
        y = full(0.0, size=2)
        group._reduce_scatter_base(
            y, torch.arange(2.0 * size, device="checked") * (rank + 1)
        ).wait()
        found["reduce-scatter"] = y.tolist()
        group.barrier().wait()
        return found

    total = size * (size + 1) / 2
    for rank, found in enumerate(in_threads(program, size=size)):
        assert found == {
            "all-reduce": [total],
            "max": [size],
            "broadcast": [size],
            "all-gather": [i + 1 for i in range(size)],
            "all-gather base": [i + 1 for i in range(size)],
            "all-to-all": [10 * i + rank for i in range(size) for _ in range(rank + 1)],
            "reduce-scatter": [2 * rank * total, (2 * rank + 1) * total],
        }


def test_coalesced_messages_are_one_operation() -> None:
    def program(rank: int, group: Any) -> list[float]:
        ours, theirs = full(rank), full(-1.0)
        group._start_coalescing()
        # Alone, these would wait for each other.
        group.send([ours], 1 - rank, 0)
        group.recv([theirs], 1 - rank, 0)
        group.send([ours[:2]], 1 - rank, 0)
        group.recv([theirs[:2]], 1 - rank, 0)
        group._end_coalescing().wait()
        return theirs[1:3].tolist()

    assert in_threads(program) == [[1, 1], [0, 0]]


def exchange(rank: int, world_size: int) -> list[float]:
    dist.init_process_group("cpu:gloo,checked:checked")
    torch.accelerator.set_device_index(rank)
    x = full(rank + 1.0)
    with checked.expect_no_errors():
        dist.all_reduce(x)
        group = dist.new_group([0, 1])
        y = full(0.0)
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1, group=group)
        else:
            dist.recv(y, 0)
            dist.send(x, 0, group=group)
        z = full(0.0)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, z, 1 - rank)]
        )
        for work in works:
            work.wait()
        dist.barrier()
        values = [0.0]
        dist.broadcast_object_list([0.0] if rank else values, 0)
        found = [x[0].item(), y[0].item(), z[0].item()]
    dist.destroy_process_group()
    return found


def test_processes_exchange_tensors() -> None:
    results = run_ranks(exchange, 2, rendezvous="environment", timeout=80)
    assert [result.value for result in results] == [[3, 3, 4], [3, 3, 3]]


# --- what it refuses


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (torch.zeros(2), "must be on a checked device"),
        (torch.zeros(2, dtype=torch.int16, device="checked"), "which NCCL does not have"),
        (torch.zeros(2, dtype=torch.complex64, device="checked"), "which NCCL does not have"),
        (torch.zeros(4, device="checked")[::2], "must be contiguous"),
    ],
)
def test_what_nccl_does_not_take_is_refused(tensor: torch.Tensor, rule: str) -> None:
    def program(rank: int, group: Any) -> str:
        with pytest.raises(RuntimeError, match=rule):
            group.send([tensor], 1 - rank, 0)
        with pytest.raises(RuntimeError, match=rule):
            group.allreduce([tensor])
        return "refused"

    assert in_threads(program) == ["refused"] * 2


def test_two_ranks_on_one_device_are_refused() -> None:
    def program(rank: int, group: Any) -> str:
        with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
            group.allreduce([full(1.0)])
        return "refused"

    assert in_threads(program, devices=[1, 1]) == ["refused"] * 2


# --- order


def both_ready(rank: int, group: Any, x: torch.Tensor) -> Any:
    """The work of a message from rank 0 to rank 1."""
    return group.send([x], 1, 0) if rank == 0 else group.recv([x], 0, 0)


def test_wait_orders_the_stream_and_returns_at_once() -> None:
    go = threading.Event()

    def program(rank: int, group: Any) -> float:
        x = full(rank)
        both_ready(rank, group, x).wait()  # makes the communicator
        x = full(rank + 1.0)
        if rank == 0:
            assert go.wait(SECONDS)
            group.send([x], 1, 0)
            return 0.0
        torch.accelerator.synchronize()
        work = group.recv([x], 0, 0)
        work.wait()
        assert not work.is_completed()
        assert not recorded().query()
        go.set()
        return (x * 1).sum().item()  # waits for the message

    assert in_threads(program) == [0, 10]


def test_using_a_receive_without_waiting_is_a_race() -> None:
    def program(rank: int, group: Any) -> str:
        x = full(1.0)
        work = both_ready(rank, group, x)
        if rank == 0:
            work.wait()
            return x[0].item()
        with pytest.raises(RuntimeError, match="receive from rank 0"):
            x * 2
        work.wait()
        return (x * 2)[0].item()

    assert in_threads(program) == [1, 2]
    assert all("receive from rank 0" in error for error in checked.errors())
    checked.clear_errors()


def test_writing_to_what_is_sent_is_a_race() -> None:
    def program(rank: int, group: Any) -> None:
        x = full(1.0)
        work = both_ready(rank, group, x)
        if rank == 0:
            x * 2  # reads beside a read
            with pytest.raises(RuntimeError, match="send to rank 1"):
                x.add_(1)
        work.wait()
        x.add_(1)
        torch.accelerator.synchronize()

    in_threads(program)
    assert len(checked.errors()) == 1
    checked.clear_errors()


def test_a_transfer_follows_the_current_stream_alone() -> None:
    def program(rank: int, group: Any) -> None:
        x, side = full(1.0), stream(f"checked:{rank}")
        with side:
            if rank == 0:
                with pytest.raises(RuntimeError, match=r"send to rank 1.*reads.*aten::fill_"):
                    group.send([x], 1, 0)
            side.wait_stream(torch.accelerator.current_stream())
        x = full(2.0)
        side.wait_stream(torch.Stream(stream_id=0, device_index=rank, device_type=20))
        with side:
            both_ready(rank, group, x).wait()
            assert x[0].item() == 2

    in_threads(program)
    assert len(checked.errors()) == 1
    checked.clear_errors()


def test_a_dropped_wait_for_a_work_is_found() -> None:
    def program(rank: int, group: Any) -> float:
        x = full(rank)
        group.barrier().wait()
        work = both_ready(rank, group, x)
        if rank == 1:
            checked.drop_nth(checked.Ordering.STREAM_WAIT, 1)
            work.wait()
            with pytest.raises(RuntimeError, match="receive from rank 0"):
                x + 1
            assert checked.verdict() == checked.Verdict.OPEN
            work.wait()
        return x.sum().item() if rank else 0.0

    assert in_threads(program) == [0, 0]
    checked.clear_errors()


def test_sent_memory_may_be_freed_at_once() -> None:
    def program(rank: int, group: Any) -> list[float]:
        found = []
        for i in range(5):
            x = full(float(i))
            work = both_ready(rank, group, x)
            if rank:
                work.wait()
                found.append(x.sum().item())
            del x, work
            full(-1.0)
        torch.accelerator.synchronize()
        return found

    assert in_threads(program)[1] == [0, 10, 20, 30, 40]


# --- what hangs


@pytest.mark.parametrize("eager", [False, True])
def test_sends_are_over_when_they_are_received(eager: bool) -> None:
    may_receive = threading.Event()

    def program(rank: int, group: Any) -> bool:
        x = full(1.0)
        both_ready(rank, group, x).wait()  # makes the communicator
        torch.accelerator.synchronize()
        checked.set_eager_sends(eager)
        if rank == 0:
            work = group.send([x], 1, 0)
            time.sleep(0.3)
            is_over: bool = work.is_completed()
            may_receive.set()
        else:
            assert may_receive.wait(SECONDS)
            work = group.recv([x], 0, 0)
            is_over = False
        work.wait()
        torch.accelerator.synchronize()
        assert work.is_completed()
        return is_over

    assert in_threads(program) == [eager, False]


def test_a_first_use_waits_for_a_posted_receive() -> None:
    checked.set_timeout(1.0)
    done = threading.Event()

    def program(rank: int, group: Any) -> float:
        x = full(rank + 1.0)
        both_ready(rank, group, x).wait()
        torch.accelerator.synchronize()
        if rank == 1:
            work = group.recv([x], 0, 0)
            with pytest.raises(RuntimeError, match=r"(?s)drains checked:1.*receive from rank 0"):
                torch.ones(3, device="checked").erfinv_()  # used nowhere else
            torch.ones(3, device="checked").erfinv_()  # the second use drains nothing
            done.set()
            work.wait()
        else:
            assert done.wait(SECONDS)
            group.send([x], 1, 0)
        return x.sum().item()

    assert in_threads(program) == [10, 10]
    assert "drains checked:1" in checked.errors()[0]
    checked.clear_errors()


def test_random_drains_find_a_receive_that_is_posted_ahead() -> None:
    checked.set_timeout(1.0)

    def program(rank: int, group: Any) -> str:
        x, y = full(rank + 1.0), full(rank)
        both_ready(rank, group, x).wait()
        torch.accelerator.synchronize()
        if rank == 0:
            return "idle"
        group.recv([x], 0, 0)
        y.add_(1)  # used before, and nothing of it depends on the message
        checked.set_drains(at_first_use=False, probability=1.0, seed=0)
        with pytest.raises(RuntimeError, match=r"(?s)drains checked:1.*receive from rank 0"):
            y.add_(1)
        checked.set_drains(at_first_use=False, probability=0.0, seed=0)
        return "found"

    torch.zeros(1, device="checked:1").add_(1)
    assert in_threads(program)[1] == "found"
    checked.clear_errors()


def test_the_first_message_waits_for_the_other_rank() -> None:
    """So two ranks that begin with two communicators in crossed order wait for ever."""

    def program(rank: int, group: Any) -> str:
        x = full(1.0)
        threading.Timer(0.5, group.abort).start()
        with pytest.raises(RuntimeError, match="aborted"):
            if rank == 0:
                group.send([x], 1, 0)
            else:
                group.allreduce([x])
        return "waited"

    assert in_threads(program) == ["waited"] * 2


def after_a_message(rank: int, group: Any) -> torch.Tensor:
    """Both ranks have exchanged the tensor that comes back, and no device is busy with it."""
    x = full(1.0)
    both_ready(rank, group, x).wait()
    torch.accelerator.synchronize()
    group.barrier().wait()
    return x


def test_abort_ends_what_waits() -> None:
    def program(rank: int, group: Any) -> str:
        x = after_a_message(rank, group)
        if rank == 0:
            return "idle"
        work = group.recv([x], 0, 0)
        threading.Timer(0.3, group.abort).start()
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        with pytest.raises(RuntimeError, match="aborted"):
            group.recv([x], 0, 0)
        return "ended"

    assert in_threads(program)[1] == "ended"


def test_a_wait_with_a_timeout_waits_on_the_host() -> None:
    def program(rank: int, group: Any) -> str:
        x = after_a_message(rank, group)
        if rank == 0:
            time.sleep(0.5)
            group.send([x], 1, 0)
            torch.accelerator.synchronize()
            return "sent"
        work = group.recv([x], 0, 0)
        with pytest.raises(RuntimeError, match="longer than 100 ms"):
            work.wait(datetime.timedelta(milliseconds=100))
        assert work.wait(datetime.timedelta(seconds=SECONDS))
        assert work.is_completed()
        return "received"

    assert in_threads(program) == ["sent", "received"]


def die_after_a_message(rank: int, world_size: int) -> str:
    dist.init_process_group("checked", timeout=datetime.timedelta(seconds=60))
    torch.accelerator.set_device_index(rank)
    x = full(rank)
    both_ready(rank, dist.group.WORLD, x).wait()
    torch.accelerator.synchronize()
    if rank == 0:
        os._exit(3)
    work = dist.irecv(x, 0)
    assert work is not None
    time.sleep(1.0)
    assert not work.is_completed()  # nobody tells a kernel that spins
    torch.distributed.distributed_c10d._abort_process_group()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()
    return "ended"


def test_a_receive_from_a_dead_process_spins_until_it_is_aborted() -> None:
    results = run_ranks(
        die_after_a_message, 2, rendezvous="environment", timeout=60, expect_failure=True
    )
    assert [result.exit_code for result in results] == [3, 0], str(results[1])
    assert results[1].value == "ended"
