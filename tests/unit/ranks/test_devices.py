"""What processes' devices must be, by facts about machines that are not at hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from pipedream2bw import _C
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.devices import (
    DeviceFacts,
    check_apart,
    check_device,
    check_sums,
    nccl_shares_devices,
)
from pipedream2bw.ranks.groups import check_built
from pipedream2bw.ranks.joining import join_world

FACTS = DeviceFacts(
    device="cuda:1", num_visible=4, host="one", uuid="GPU-1", backend="nccl", local_rank="1"
)


def changed(**changes: object) -> DeviceFacts:
    return dataclasses.replace(FACTS, **changes)  # type: ignore[arg-type]


def test_a_device_that_is_there_is_accepted() -> None:
    check_device(FACTS)
    check_device(changed(device="cuda:3"))
    check_device(changed(device="cuda"))


@pytest.mark.parametrize(("device", "visible"), [("cuda:4", 4), ("cuda:0", 0), ("cuda", 0)])
def test_a_device_that_is_not_there_is_refused(device: str, visible: int) -> None:
    with pytest.raises(ValueError, match=f"device: {device}, .*sees: {visible}: there is none"):
        check_device(changed(device=device, num_visible=visible))


def test_two_ranks_on_one_device_are_refused_with_nccl_alone() -> None:
    other = changed(device="cuda:0", uuid="GPU-0")
    check_apart([other, FACTS, changed(uuid="GPU-7", host="two")])
    # Each process may see one device alone, which it calls the first.
    seen_alone = changed(device="cuda:0", num_visible=1)
    with pytest.raises(ValueError, match="rank 1: cuda:1 of one, rank 2: cuda:0 of one: this is"):
        check_apart([other, FACTS, seen_alone])
    check_apart([changed(backend="gloo"), changed(backend="gloo")])


def test_nccl_that_both_ranks_have_asked_to_share_a_device_may() -> None:
    shares = changed(can_be_shared=True)
    check_apart([shares, shares])
    for pair in ([shares, FACTS], [FACTS, shares]):
        with pytest.raises(ValueError, match="this is one device, and NCCL needs one for each"):
            check_apart(pair)


@pytest.mark.parametrize(
    ("asked", "version", "shares"),
    [
        ("1", (2, 30, 3), True),
        ("1", (3, 0), True),
        ("1", (2, 29, 7), False),
        ("0", (2, 30, 3), False),
        (None, (2, 30, 3), False),
    ],
)
def test_nccl_shares_devices_from_2_30_on_if_it_is_asked_to(
    asked: str | None, version: tuple[int, ...], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if asked is not None:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked)
    assert nccl_shares_devices() == shares


def test_without_local_rank_processes_that_see_all_devices_have_to_choose_their_own() -> None:
    unaware = changed(device="cuda:0", uuid="GPU-0", local_rank=None)
    for backend in ("gloo", "nccl"):
        same = dataclasses.replace(unaware, backend=backend)
        with pytest.raises(ValueError, match=r"rank 0: cuda:0 .*rank 1: .* 4 .*without LOCAL_RANK"):
            check_apart([same, same])
    check_apart([unaware, dataclasses.replace(unaware, device="cuda:1", uuid="GPU-1")])
    alone = dataclasses.replace(unaware, num_visible=1, backend="gloo")
    check_apart([alone, alone])  # which has no other to choose


def test_devices_without_a_name_in_the_world_are_told_apart_by_machine_and_number() -> None:
    nameless = changed(uuid="")
    check_apart([nameless, changed(uuid="", device="cuda:2")])
    check_apart([nameless, changed(uuid="", host="two")])
    check_apart([nameless, changed(uuid="", visible="2,3")])
    with pytest.raises(ValueError, match="rank 0: cuda:1 of one, rank 1: cuda:1 of one"):
        check_apart([nameless, nameless])


@pytest.mark.parametrize("backend", ["gloo", None])
def test_sums_on_devices_need_a_backend_for_them(backend: str | None) -> None:
    check_sums(FACTS, "width: 2")
    with pytest.raises(ValueError, match=f"cuda:1, backend .*: {backend}, width: 2"):
        check_sums(changed(backend=backend), "width: 2")


def test_gpus_need_a_torch_with_nccl_to_join() -> None:
    check_built("cuda", has_nccl=True)
    check_built("cpu", has_nccl=False)
    with pytest.raises(ValueError, match="cuda, backends of this torch: gloo without nccl"):
        check_built("cuda", has_nccl=False)


def test_processes_with_gpus_do_not_join_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="model's device: cuda, backends of this torch: gloo"):
        join_world("cuda", Deadline(1.0, _C.Fault()))
