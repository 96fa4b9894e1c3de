"""Processes with a device each train over a group like NCCL's, with its waits and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw.ranks import channels
from tests.device import checked
from tests.device.on_device import check_on_device
from tests.runs.launch import run_ranks
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import sizes_for


def join(rank: int, drains: float) -> str:
    """Makes this process's group and gives its device."""
    torch.set_num_threads(1)
    device = f"checked:{rank}"
    torch.accelerator.set_device_index(rank)
    if not dist.is_initialized():
        dist.init_process_group("checked")
    # Whatever waits for a device on a real one does so here at random.
    checked.set_drains(at_first_use=True, probability=drains, seed=rank)
    checked.set_timeout(20.0)
    return device


def train_over_a_group(rank: int, world: int, schedules: list[str]) -> None:
    """Where processes share no memory of their devices, as on several machines."""
    with mock.patch.object(channels, "make_device_ring", return_value=None):
        train_every_schedule(rank, world, schedules)


def train_every_schedule(rank: int, world: int, schedules: list[str]) -> None:
    for name in ("drawing", "mlp"):  # the first has skip connections: several messages an action
        train_schedules(rank, world, schedules, name)


def train_schedules(rank: int, world: int, schedules: list[str], name: str) -> None:
    device = join(rank, drains=0.05)
    for schedule in schedules:
        of_ranks = [sizes for sizes in sizes_for(schedule, world) if sizes.stages_per_rank == 1]
        if not of_ranks:
            more = sizes_for(schedule, 2 * world)
            of_ranks = [sizes for sizes in more if sizes.stages_per_rank == 2]
        for sizes in of_ranks[:1]:
            m = sizes.num_microbatches
            with checked.expect_no_errors():
                check_on_device(
                    TASKS[name],
                    sizes.num_stages,
                    m,
                    [2 * m] * 4,
                    home=device,
                    num_devices=None,
                    schedule=schedule,
                    stages_per_rank=sizes.stages_per_rank,
                )


@pytest.mark.parametrize("train", [train_over_a_group, train_every_schedule])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_schedule_in_processes(world: int, train: Callable[..., None]) -> None:
    run_ranks(
        train,
        world,
        args=(pd2.schedule_names(),),
        rendezvous="environment",
        timeout=200,
    )
