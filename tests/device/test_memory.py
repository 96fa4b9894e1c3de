"""The checked device finds every race for its memory and for the host's pinned memory."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from tests.device.races import SIZE, current, race, recorded, stream, zeros


def test_new_and_freed_memory_is_poison() -> None:
    x = torch.empty(SIZE, device="checked")
    assert x.isnan().all().item()
    address = x.data_ptr()
    x.zero_()
    del x
    y = torch.empty(SIZE, device="checked")
    assert y.data_ptr() == address
    assert y.isnan().all().item()
    assert torch.empty(3, dtype=torch.bfloat16, device="checked").isnan().all().item()


def test_memory_is_aligned() -> None:
    for size in (1, 100, 1000):
        assert torch.empty(size, device="checked").data_ptr() % 512 == 0


def test_freed_memory_that_another_stream_reads_is_a_race() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x * 2
    del x
    with race("allocation", "aten::mul"):
        torch.empty(1, device="checked")


def test_freed_memory_may_be_ordered_before_it_is_used_again() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x * 2
    del x
    current().wait_stream(side)
    torch.empty(SIZE, device="checked")


def test_recorded_memory_is_no_race() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x * 2
    x.record_stream(side)
    del x
    torch.empty(SIZE, device="checked").add_(1)


def test_recording_on_a_wrong_stream_is_a_race() -> None:
    x, side = zeros(), stream()
    side.wait_stream(current())
    with side:
        x * 2
    x.record_stream(stream())
    del x
    with race("allocation", "aten::mul"):
        torch.empty(1, device="checked")


def test_memory_of_another_stream_must_be_ordered() -> None:
    zeros()
    side = stream()
    x = torch.empty(SIZE, device="checked")
    with race("aten::zero_", "allocation"), side:
        x.zero_()


def test_freed_memory_goes_back_to_its_stream() -> None:
    side = stream()
    with side:
        address = zeros().data_ptr()
    assert torch.empty(SIZE, device="checked").data_ptr() != address
    with side:
        assert torch.empty(SIZE, device="checked").data_ptr() == address


# --- pinned memory


def test_host_reads_beside_a_copy() -> None:
    x, pinned = zeros(), torch.zeros(SIZE).pin_memory()
    assert pinned.is_pinned()
    pinned.copy_(x, non_blocking=True)
    pinned.sum()
    with race("copy to the host", "aten::sum"):
        torch.accelerator.synchronize()
    pinned.sum()


def test_host_writes_beside_a_copy() -> None:
    pinned = torch.zeros(SIZE).pin_memory()
    x = pinned.to("checked", non_blocking=True)
    pinned.sum()  # reads beside a read
    pinned.fill_(1)
    with race("copy from the host", "aten::fill_"):
        x.add_(1)
    with race("pinned memory was written before a copy from it was over"):
        current().synchronize()
    pinned.fill_(1)


def test_the_host_has_what_a_copy_gives_it_when_it_has_waited() -> None:
    pinned = torch.zeros(SIZE).pin_memory()
    seen = (ctypes.c_float * SIZE).from_address(pinned.data_ptr())  # which no operator tells of
    pinned.copy_(zeros() + 3, non_blocking=True)
    assert math.isnan(seen[0])
    assert bool((pinned.to("checked", non_blocking=True) == 3).all())  # a stream has it
    current().synchronize()
    assert seen[0] == 3


def test_what_the_host_writes_unseen_beside_a_copy_is_found() -> None:
    pinned = torch.zeros(SIZE).pin_memory()
    seen = (ctypes.c_float * SIZE).from_address(pinned.data_ptr())
    x = pinned.to("checked", non_blocking=True)
    seen[SIZE - 1] = 1.0
    with race("pinned memory was written before a copy from it was over"):
        current().synchronize()
    x.add_(1)


@pytest.mark.parametrize("to_host", [True, False])
def test_copies_on_two_streams_race_for_pinned_memory(to_host: bool) -> None:
    x, pinned, side = zeros(), torch.zeros(SIZE).pin_memory(), stream()
    y = zeros()
    side.wait_stream(current())
    if to_host:
        pinned.copy_(x, non_blocking=True)
    else:
        x.copy_(pinned, non_blocking=True)
    with race("copy to the host"), side:
        pinned.copy_(y, non_blocking=True)


def test_waiting_for_a_copy_is_enough() -> None:
    x, pinned = zeros().add_(2), torch.zeros(SIZE).pin_memory()
    pinned.copy_(x, non_blocking=True)
    recorded().synchronize()
    assert pinned.sum().item() == 2 * SIZE


def test_other_host_memory_goes_through_a_buffer() -> None:
    host = torch.ones(SIZE)
    x = host.to("checked", non_blocking=True)
    host.fill_(2)
    back = torch.zeros(SIZE).copy_(x, non_blocking=True)
    assert back.sum().item() == SIZE
    pinned = x.to("cpu", non_blocking=True)  # torch's own choice
    assert pinned.is_pinned()
