"""Messages between processes with a device, by way of the hosts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw import _C
from pipedream2bw.ranks.channels import end_of_channel
from tests.device import checked
from tests.device.on_device import moved
from tests.device.test_process_group import connect, full, in_threads
from tests.runs.launch import run_ranks

DEVICE = torch.device("checked:0")
COUNT = 12


def exchange(rank: int, world: int) -> None:
    """Rank 0 sends what it computes on the device, and the device's memory is used again."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    sender, receiver = end_of_channel(group, 0, 1, DEVICE, 4, fault=_C.Fault())
    assert isinstance(sender or receiver, (_C.StagedSender, _C.StagedReceiver))
    with checked.expect_no_errors():
        for i in range(COUNT):
            if sender is not None:
                short = torch.full([3], i, device=DEVICE, dtype=torch.int16) * 2
                sender.send(0, [short, torch.ones(2, 5, device=DEVICE).t() + i])
            if receiver is not None:
                receiver.expect(0)
                short, floats = receiver.receive()
                assert short.device == DEVICE
                assert short.tolist() == [2 * i] * 3
                assert floats.stride() == (1, 5)
                assert (floats * 2).tolist() == [[2.0 + 2 * i] * 2] * 5
        dist.barrier()
    refuse_replicas()


def refuse_replicas() -> None:
    """The group has gloo alone, which adds up nothing of a device's."""
    layer = moved(torch.nn.Linear(4, 4), "checked:0")
    with pytest.raises(ValueError, match=r"backend of the process group for it: None, width: 2"):
        pd2.PipelineModule(
            layer,
            torch.nn.functional.mse_loss,
            num_stages=1,
            num_microbatches=1,
            width=2,
            example_args=(torch.zeros(1, 4, device=DEVICE),),
            timeout=20.0,
        )


def test_messages_of_a_device_arrive_in_order_and_without_a_race() -> None:
    run_ranks(exchange, 2, timeout=60)


def test_a_message_goes_up_while_the_device_is_at_work() -> None:
    """And memory for it is there then: the way up need not wait for what was given before."""
    has_come = threading.Event()
    hosts = _C.LocalChannel(source=torch.device("cpu"), destination=torch.device("cpu"))

    def program(rank: int, group: Any) -> list[float]:
        connect(rank, group)
        x = full(7.0, size=2)
        if rank == 0:
            assert has_come.wait(5)
            group.send([x], 1, 0)
            return x.tolist()
        receiver = _C.StagedReceiver(hosts=hosts, device=x.device)
        group.recv([x], 0, 0).wait()  # all that this stream is given next comes after it
        hosts.send(0, [torch.full([2], 3.0).pin_memory()])
        receiver.expect(0)
        (message,) = receiver.receive()
        has_come.set()
        return (message + x).tolist()

    checked.set_drains(at_first_use=False, probability=0.0, seed=0)
    assert in_threads(program) == [[7.0, 7.0], [10.0, 10.0]]
