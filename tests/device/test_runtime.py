"""The checked device finds every race, and none where streams, events or the host order work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.device import checked
from tests.device.checked import Ordering, Verdict
from tests.device.races import SIZE, current, race, recorded, stream, zeros

# --- races


def test_reading_beside_a_write_is_a_race() -> None:
    x, side = zeros(), stream()
    x.add_(1)
    with race("aten::mul", "aten::add"), side:
        x * 2


def test_writing_beside_a_read_is_a_race() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        y = x * 2
    with race("aten::add", "aten::mul"):
        x.add_(1)
    side.synchronize()
    assert y.sum().item() == 0


def test_writing_beside_a_write_is_a_race() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x.add_(1)
    with race("aten::add"):
        x.add_(1)


def test_reading_beside_a_read_is_none() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x * 2
    x * 2


def test_other_bytes_of_an_allocation_are_no_race() -> None:
    x, side = zeros(), stream()
    rows = x.view(10, -1)
    side.wait_stream(current())
    with side:
        rows[:, 3:5].add_(1)
    rows[:, 5:7].add_(1)
    rows[:, :3].sum()
    with race("aten::sum"):
        rows[:, 4].sum()


def test_a_copy_is_a_use() -> None:
    x, side = zeros(), stream()
    x.add_(1)
    with race("copy to the host"), side:
        x.cpu()
    with race("aten::_local_scalar_dense"), side:
        x[0].item()


def test_a_race_names_streams_and_threads() -> None:
    x, side = zeros(), stream()
    x.add_(1)
    found = []

    def read() -> None:
        try:
            with side:
                x * 2
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    (text,) = found
    assert f"stream {side.stream_id} of checked:0 by thread {thread.native_id}" in text
    assert f"stream 0 of checked:0 by thread {threading.get_native_id()}" in text
    checked.clear_errors()


# --- order


def wait_event(x: torch.Tensor, side: torch.Stream) -> None:
    side.wait_event(recorded())


def wait_stream(x: torch.Tensor, side: torch.Stream) -> None:
    side.wait_stream(current())


def wait_in_two_steps(x: torch.Tensor, side: torch.Stream) -> None:
    between = stream()
    between.wait_stream(current())
    side.wait_event(recorded(between))


def synchronize_event(x: torch.Tensor, side: torch.Stream) -> None:
    recorded().synchronize()


def synchronize_stream(x: torch.Tensor, side: torch.Stream) -> None:
    current().synchronize()


def synchronize_device(x: torch.Tensor, side: torch.Stream) -> None:
    torch.accelerator.synchronize()


def query_event(x: torch.Tensor, side: torch.Stream) -> None:
    event = recorded()
    while not event.query():
        pass


def item(x: torch.Tensor, side: torch.Stream) -> None:
    x[0].item()


def copy_to_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x[:1].cpu()


def copy_from_the_host(x: torch.Tensor, side: torch.Stream) -> None:
    x[:1].copy_(torch.ones(1))


def synchronize_in_another_thread(x: torch.Tensor, side: torch.Stream) -> None:
    event = recorded()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "order",
    [
        wait_event,
        wait_stream,
        wait_in_two_steps,
        synchronize_event,
        synchronize_stream,
        synchronize_device,
        query_event,
        item,
        copy_to_the_host,
        copy_from_the_host,
        synchronize_in_another_thread,
    ],
)
def test_ordered_work_is_no_race(order: Callable[[torch.Tensor, torch.Stream], None]) -> None:
    x, side = zeros(), stream()
    x.add_(1)
    order(x, side)
    with side:
        assert (x * 2).sum().item() >= 0


def record_before_the_write(x: torch.Tensor, side: torch.Stream) -> None:
    event = recorded()
    x.add_(1)
    side.wait_event(event)


def wait_on_another_stream(x: torch.Tensor, side: torch.Stream) -> None:
    x.add_(1)
    stream().wait_event(recorded())


def record_another_stream(x: torch.Tensor, side: torch.Stream) -> None:
    x.add_(1)
    side.wait_event(recorded(stream()))


def synchronize_another_device(x: torch.Tensor, side: torch.Stream) -> None:
    x.add_(1)
    torch.accelerator.synchronize(1)


def copy_without_waiting(x: torch.Tensor, side: torch.Stream) -> None:
    x.add_(1)
    x[:1].copy_(torch.ones(1).pin_memory(), non_blocking=True)


def wait_the_wrong_way(x: torch.Tensor, side: torch.Stream) -> None:
    x.add_(1)
    current().wait_stream(side)


@pytest.mark.parametrize(
    "disorder",
    [
        record_before_the_write,
        wait_on_another_stream,
        record_another_stream,
        synchronize_another_device,
        copy_without_waiting,
        wait_the_wrong_way,
    ],
)
def test_an_order_of_other_work_is_a_race(
    disorder: Callable[[torch.Tensor, torch.Stream], None],
) -> None:
    x, side = zeros(), stream()
    disorder(x, side)
    with race("aten::mul"), side:
        x * 2


def test_threads_on_one_stream_are_ordered_by_launch() -> None:
    x = zeros()
    for _ in range(3):
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()
    assert x[0].item() == 3


def test_a_random_drain_orders_nothing() -> None:
    checked.set_drains(at_first_use=False, probability=1.0, seed=1)
    x, side = zeros(), stream()
    x.add_(1)
    before = checked.num_drains()
    with race("aten::mul"), side:
        x * 2
    assert checked.num_drains() > before


def test_copies_between_devices_order_both() -> None:
    x = zeros("checked:0")
    x.add_(1)
    y = x.to("checked:1")
    y.add_(1)
    x.copy_(y)
    assert x[0].item() == 2
    y.add_(1)
    side = stream("checked:1")
    with race("copy between devices"), side:
        y.to("checked:2")


# --- streams and events


def test_pool_gives_streams_of_both_priorities() -> None:
    ids = {torch.Stream("checked:2", priority=p).stream_id for p in (0, -1) for _ in range(40)}
    assert len(ids) == 64
    assert torch.Stream("checked:2").device == torch.device("checked:2")


def test_elapsed_time() -> None:
    first = torch.Event("checked", enable_timing=True)
    last = torch.Event("checked", enable_timing=True)
    first.record(current())
    time.sleep(0.02)
    last.record(current())
    last.synchronize()
    assert 20 <= first.elapsed_time(last) < 5000


def test_an_event_that_was_not_recorded_orders_nothing() -> None:
    x, side = zeros(), stream()
    event = torch.Event("checked")
    assert event.query()
    side.wait_event(event)
    with race("aten::mul"), side:
        x * 2


# --- what is left out


def program() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())  # 1: needed
    with side:
        x.mul_(2)
    side.wait_stream(current())  # 2: needed by nobody, implied
    x.record_stream(side)  # 1: not needed before the next stream wait
    current().wait_stream(side)  # 3: needed
    x.add_(1)
    y = zeros()
    side.wait_stream(current())  # 4: needed
    with side:
        y * 2
    y.record_stream(side)  # 2: needed
    del y
    zeros()


@pytest.mark.parametrize(
    ("kind", "n", "is_found"),
    [
        (Ordering.STREAM_WAIT, 1, True),
        (Ordering.STREAM_WAIT, 2, False),
        (Ordering.STREAM_WAIT, 3, True),
        (Ordering.STREAM_WAIT, 4, True),
        (Ordering.RECORD_STREAM, 1, False),
        (Ordering.RECORD_STREAM, 2, True),
    ],
)
def test_what_is_left_out_is_found_or_implied(kind: Ordering, n: int, is_found: bool) -> None:
    torch.accelerator.synchronize()
    checked.drop_nth(kind, n)
    if is_found:
        with race():
            program()
    else:
        program()
        zeros()  # where the memory may be used again
    assert checked.verdict() == (Verdict.OPEN if is_found else Verdict.IMPLIED)
    checked.drop_nth(kind, 0)
    program()
    assert checked.count(kind) == (4 if kind is Ordering.STREAM_WAIT else 2)
    assert checked.verdict() is None


def test_a_wait_of_the_host_can_be_left_out() -> None:
    x, side = zeros(), stream()
    checked.drop_nth(Ordering.HOST_WAIT, 1)
    current().synchronize()
    with race("aten::mul"), side:
        x * 2
    assert checked.verdict() == Verdict.OPEN


# --- autograd, kernels


def test_autograd_orders_the_streams_of_its_nodes() -> None:
    x, side = torch.ones(SIZE, device="checked", requires_grad=True), stream()
    side.wait_stream(current())
    with side:
        y = x * 2
    current().wait_stream(side)
    y.record_stream(current())
    (y * 3).sum().backward()
    assert x.grad is not None
    assert x.grad[0].item() == 6


def test_a_kernel_on_pointers_is_checked() -> None:
    x, side = zeros(), stream()

    def read() -> None:
        checked.access(x.data_ptr(), x.nbytes, False, "own kernel")

    read()
    with race("own kernel", "aten::zero_"), side:
        read()
    side.wait_stream(current())
    with side:
        checked.access(x.data_ptr(), x.nbytes, True, "own kernel")
    with race("own kernel", "aten::add"):
        x + 1
    with pytest.raises(ValueError, match="own kernel: memory of device -1"):
        checked.access(torch.zeros(1).data_ptr(), 4, False, "own kernel")
