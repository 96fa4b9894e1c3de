"""Process groups of some of the processes, each made by its members alone."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .deadline import Deadline
from .device_groups import (
    backend_for_all,
    end_with_fault,
    errors_left_to_engine,
    go_over_hosts,
)

_LARGE = 32 * 2**20
"""Bytes from which on NCCL takes the algorithm, and makes the connections, of all larger sizes."""

_ADDED = (torch.uint8, torch.float32, torch.bfloat16)
"""What is added up. Some of NCCL's algorithms are for floating-point numbers alone."""


def number_groups_alike(store: Store, name: str) -> None:
    """Sets torch's number of the next group to the highest of all ranks. Every process calls it.

    A pipeline that failed while it made groups may have made more of them on some ranks.

    Args:
        name: of the pipeline, the same on every rank.
    """
    world = dist.distributed_c10d._world
    keys = [f"pipedream2bw/{name}/groups/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], str(world.group_count))
    world.group_count = max(map(int, store.multi_get(keys)))


def new_group(
    teams: Iterable[Collection[int]],
    deadline: Deadline,
    backend: str | None = None,
    timeout: datetime.timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup | None:
    """Makes a group of each team's processes; gives the one that this process is in.

    Every process calls it, in one order, for a group's name is its number. Processes outside a team
    do nothing but count it.

    Args:
        backend: None: those of the default group, and gloo for hosts if it has none for them.
        timeout: of the group's transfers; None: the deadline's.
        options: of the backend.
    """
    backend = backend or backend_for_all()
    timeout = timeout or datetime.timedelta(seconds=deadline.seconds)
    world = dist.distributed_c10d._world
    own = None
    with errors_left_to_engine():
        for team in teams:
            name = str(world.group_count)
            world.group_count += 1
            if dist.get_rank() in team:
                join = functools.partial(
                    join_members, sorted(team), name, backend, timeout, options
                )
                own = deadline.wait("making a group", join)
    if own is not None:
        end_with_fault(own, deadline.fault)
    return own


def join_members(
    members: list[int],
    name: str,
    backend: str | None,
    timeout: datetime.timedelta,
    options: Any = None,
) -> dist.ProcessGroup:
    """The group of some processes of the default group; they alone call it.

    torch's ``new_group`` wants all processes: where the default group is bound to a device, it
    makes each group by splitting the default group's communicator, in which all take part. Its
    ``use_local_synchronization`` names a group by how many others the process has, which differs
    between the ends of an edge, and leaves the splitting.

    Args:
        name: which no other group has.
        options: of the backend.
    """
    c10d = dist.distributed_c10d
    make: Any = c10d._new_process_group_helper  # a name's type differs between torch's versions
    world = c10d._world
    default = world.default_pg
    assert default is not None
    of_default, store = world.pg_map[default]
    with _unbound(default):
        group, _ = make(
            len(members),
            members.index(dist.get_rank()),
            members,
            backend or of_default,
            store,
            name,
            options,
            timeout=timeout,
        )
    world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


@contextlib.contextmanager
def _unbound(group: dist.ProcessGroup) -> Iterator[None]:
    """Groups made inside get communicators of their own, instead of parts of this one's."""
    device = group.bound_device_id
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup, source: int, deadline: Deadline
) -> None:
    """Gives all processes of a group the tensor of one, by its number in the group."""
    send = functools.partial(dist.broadcast, tensor, group=group, group_src=source)
    if tensor.device.type == "cpu":
        deadline.wait("broadcasting", send)
    else:
        send()  # only enqueues it, in this thread's stream


def connect_devices(
    group: dist.ProcessGroup, device: torch.device, most_bytes: int, deadline: Deadline
) -> None:
    """Makes a group's connections between devices. All its members call it, before other transfers.

    A group of devices makes them at first use, of each kind and size, where the host waits for the
    others: by then these may wait for a message from this process.

    Args:
        device: of this process's tensors.
        most_bytes: of what the group will add up at once.
    """
    if go_over_hosts({device.type}):
        return

    def use_every_kind(bytes_each: int) -> None:
        mine = torch.zeros(bytes_each, dtype=torch.uint8, device=device)
        from_all = torch.zeros(group.size() * bytes_each, dtype=torch.uint8, device=device)
        for dtype in _ADDED:
            number = max(1, from_all.nbytes // dtype.itemsize)
            dist.all_reduce(torch.zeros(number, dtype=dtype, device=device), group=group)
        dist.all_gather_into_tensor(from_all, mine, group=group)
        each = [bytes_each] * group.size()
        dist.all_to_all_single(torch.empty_like(from_all), from_all, each, each, group=group)

    for number in sorted({1, max(1, min(most_bytes, _LARGE) // group.size())}):
        deadline.wait("connecting replicas", functools.partial(use_every_kind, number))


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends the groups, as far as they still exist."""
    for group in groups:
        with contextlib.suppress(Exception):  # the default group may be gone, and they with it
            dist.destroy_process_group(group)
