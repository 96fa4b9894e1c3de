"""Groups of some of the processes, made without the others."""

from __future__ import annotations

import datetime
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipedream2bw import _C
from pipedream2bw.ranks import groups
from pipedream2bw.ranks.deadline import Deadline
from pipedream2bw.ranks.groups import destroy_groups, new_group
from tests.runs import backends
from tests.runs.launch import run_ranks


def make_and_sum(rank: int, world: int) -> dict[str, Any]:
    """Pairs and a group of all, where torch would split the default group's communicator."""
    deadline = Deadline(20.0, _C.Fault())
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = torch.device("cuda:0")
    asked: list[list[int]] = []
    join_members = groups.join_members

    def recorded(members: list[int], *args: Any) -> dist.ProcessGroup:
        asked.append(members)
        return join_members(members, *args)

    sums, names = [], []
    with mock.patch.object(groups, "join_members", recorded):
        for teams in ([(1, 0)], [(1, 2)], [(2, 0)], [(0,), (1, 2)], [range(world)]):
            group = new_group(teams, deadline, "gloo", datetime.timedelta(seconds=20))
            if group is None:
                continue
            value = torch.tensor([10**rank])
            dist.all_reduce(value, group=group)
            assert dist.get_process_group_ranks(group) == asked[-1]
            assert group.bound_device_id is None
            sums.append(int(value))
            names.append(group.group_name)
            destroy_groups([group])
    assert default.bound_device_id == torch.device("cuda:0")
    default.bound_device_id = None
    return {"asked": asked, "sums": sums, "names": names}


@pytest.mark.slow
def test_a_group_is_made_by_its_members_alone() -> None:
    first, second, third = (ranks.value for ranks in run_ranks(make_and_sum, 3, timeout=60))
    assert first["asked"] == [[0, 1], [0, 2], [0], [0, 1, 2]]
    assert second["asked"] == [[0, 1], [1, 2], [1, 2], [0, 1, 2]]
    assert third["asked"] == [[1, 2], [0, 2], [1, 2], [0, 1, 2]]
    assert first["sums"] == [11, 101, 1, 111]
    assert second["sums"] == [11, 110, 110, 111]
    assert third["sums"] == [110, 101, 110, 111]
    # Of one name on all members, whatever groups the others have made.
    numbers = [int(name) for name in first["names"]]
    assert numbers == [numbers[0] + i for i in (0, 2, 3, 5)]
    assert [int(name) for name in third["names"]] == [numbers[0] + i for i in (1, 2, 4, 5)]


def train_on_hosts(rank: int, world: int, how: str) -> None:
    torch.set_num_threads(1)
    mesh = backends.join(how, "cpu", (2, world // 2))
    for width in (world // 2, world):
        backends.check_training("cpu", width, mesh if width == world // 2 else None)


@pytest.mark.parametrize("how", backends.JOINS)
def test_the_processes_group_may_be_made_without_a_backend(how: str) -> None:
    run_ranks(train_on_hosts, 4, args=[how], rendezvous="environment", timeout=60)
