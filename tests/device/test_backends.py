"""A process group that knows nothing of hosts joins stages on the device, and stages on hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.device import checked
from tests.runs import backends
from tests.runs.launch import run_ranks


def train(rank: int, world: int, how: str) -> None:
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    checked.set_timeout(20.0)
    mesh = backends.join(how, "checked", (world, 1))
    if how == "checked":  # by torch 2.13 the others have none either
        assert "cpu" not in dist.get_backend_config()
    with checked.expect_no_errors():
        for device in (f"checked:{rank}", "cpu"):
            backends.check_training(device, world, mesh)  # gradients are summed
            backends.check_training(device, 1)  # messages


@pytest.mark.parametrize("how", [*backends.JOINS, "checked"])
def test_a_group_without_a_backend_for_hosts(how: str) -> None:
    run_ranks(train, 2, args=[how], rendezvous="environment", timeout=60)
