"""Channels as devices' process groups need them, over hosts: the rest is the same."""

from __future__ import annotations

import os
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipedream2bw import _C
from pipedream2bw.ranks import channels
from pipedream2bw.ranks.channels import end_of_channel
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.groups import (
    backends_of,
    errors_left_to_engine,
    go_over_hosts,
    new_group,
    options_of_messages,
)
from tests.distributed.test_exactness import check
from tests.runs.launch import run_ranks
from tests.samples.models import TASKS

CPU = torch.device("cpu")


def train(rank: int, world: int) -> None:
    # Edges are connected first, headers go over the control group, receives begin when awaited.
    with mock.patch.object(channels, "go_over_hosts", return_value=False):
        for schedule in ("2bw", "1f1b", "chimera"):
            check(TASKS["mlp"], world, 2 * world, [4 * world] * 5, schedule=schedule)
        # Microbatches of several layouts, each with a header of its own.
        check(TASKS["mlp"], world, world, [2 * world + 1, 3 * world, 2 * world + 1] * 2)
        check(TASKS["skips"], world, world, [2 * world] * 4, exact=TASKS["skips"].exact)


@pytest.mark.parametrize("world", [2, 4])
def test_messages_whose_headers_go_another_way_keep_every_bit(world: int) -> None:
    run_ranks(train, world, timeout=120)


def headers_of_two_channels(rank: int, world: int) -> None:
    hosts = dist.new_group()
    assert hosts is not None
    senders, receivers = [], []
    for tag in (1, 2):
        group = dist.new_group()
        assert group is not None
        sender, receiver = end_of_channel(
            group, 0, 1, CPU, 4, fault=_C.Fault(), headers=(hosts, tag)
        )
        senders.append(sender)
        receivers.append(receiver)
    for end in senders if rank == 0 else receivers:
        assert isinstance(end, (_C.ProcessGroupSender, _C.ProcessGroupReceiver))
        end.connect()
    if rank == 0:
        for size, sender in enumerate(senders, 1):
            assert sender is not None
            sender.send(0, [torch.full([size], float(size))])
    else:
        for size, receiver in ((2, receivers[1]), (1, receivers[0])):  # not as they were sent
            assert receiver is not None
            receiver.expect(0)
            receiver.post()  # of a new layout: waits for its header
            assert receiver.receive()[0].tolist() == [float(size)] * size
    dist.barrier()


def test_each_channel_has_headers_of_its_own() -> None:
    run_ranks(headers_of_two_channels, 2, timeout=60)


def what_goes_over_hosts(rank: int, world: int) -> None:
    assert backends_of()["cpu"] == "gloo"
    assert go_over_hosts(["cpu"])
    assert go_over_hosts(["cuda", "cpu"])
    assert go_over_hosts(["cuda"])  # the group has gloo alone
    given = []

    def make(*args: Any, **kwargs: Any) -> Any:
        given.append(args[6])
        return made(*args, **kwargs)

    made = dist.distributed_c10d._new_process_group_helper
    with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", make):
        new_group([[0]], Deadline(10.0, _C.Fault()), "gloo", options="some")
    assert given == ["some"]


def test_messages_go_over_hosts_where_the_group_knows_no_device() -> None:
    run_ranks(what_goes_over_hosts, 1, timeout=60)


def test_groups_of_messages_come_first_and_take_few_of_a_gpus_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = types.SimpleNamespace(
        Options=lambda is_high_priority_stream: types.SimpleNamespace(
            config=types.SimpleNamespace(max_ctas=None), is_first=is_high_priority_stream
        )
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    assert options_of_messages("nccl").config.max_ctas == 4
    assert options_of_messages("nccl").is_first
    assert options_of_messages("gloo") is None
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    assert options_of_messages("nccl").config.max_ctas is None
    assert options_of_messages("nccl").is_first


def test_error_handling_is_set_while_groups_are_made_unless_the_user_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    with errors_left_to_engine():
        assert os.environ[name] == "2"
    assert name not in os.environ
    monkeypatch.setenv(name, "1")
    with errors_left_to_engine():
        assert os.environ[name] == "1"
    assert os.environ[name] == "1"
