"""Process groups: of hosts and of devices, each made by its members alone."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .. import _C
from .deadline import Deadline

_LARGE = 32 * 2**20
"""Bytes from which on NCCL takes the algorithm, and makes the connections, of all larger sizes."""

_ADDED = (torch.uint8, torch.float32, torch.bfloat16)
"""What is added up. Some of NCCL's algorithms are for floating-point numbers alone."""

TIMEOUT = datetime.timedelta(days=1)
"""The timeout of a group that carries messages, which never comes: the engine's own rules end
waiting, while the group would count the user's pauses too, and end the process."""

_MOST_BLOCKS = 4
"""How many multiprocessors of a device NCCL takes for a transfer: a few reach the bandwidth of a
link, while by default up to 32 are kept from the stages' work, with 12 MiB each."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"  # ErrorHandlingMode of torch's ProcessGroupNCCL.hpp


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
    do nothing but count it. A group whose transfers run on a device is aborted when the pipeline
    fails.

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
    if own is not None and runs_on_device(own):
        _C.abort_on_fault(deadline.fault, own.group_name)
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
    # Unbound, for a communicator of its own instead of a part of the default group's.
    device, default.bound_device_id = default.bound_device_id, None
    try:
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
    finally:
        default.bound_device_id = device
    world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup, source: int, deadline: Deadline
) -> None:
    """Gives all processes of a group the tensor of one, by its number in the group."""
    send = functools.partial(dist.broadcast, tensor, group=group, group_src=source)
    if tensor.device.type == "cpu":
        deadline.wait("broadcasting", send)
    else:
        send()  # only enqueues it, in this thread's stream


def told_by_all(value: Any, group: dist.ProcessGroup, deadline: Deadline, action: str) -> list[Any]:
    """Every process's ``value``, on every process of a group; ``action``: for an error."""
    told: list[Any] = [None] * group.size()
    deadline.wait(action, lambda: dist.all_gather_object(told, value, group=group))
    return told


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


def check_built(device_type: str, has_nccl: bool) -> None:
    """Raises ValueError if processes cannot join for want of NCCL."""
    if device_type == "cuda" and not has_nccl:
        raise ValueError(
            "type of the model's device: cuda, backends of this torch: gloo without nccl. Install "
            "a torch with NCCL, or call init_process_group('gloo') before"
        )


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The name of a group's backend for each type of device; by default of the default group."""
    parts = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (part.partition(":") for part in parts)}


def backend_for_all() -> str | None:
    """The backends of the default group, and gloo for hosts; None if it has one for hosts itself.

    It has none after ``init_process_group("nccl")``, nor, where there is an accelerator, after
    ``init_process_group()`` or ``init_device_mesh``; but a model may be on the CPU there.
    """
    backends = backends_of()
    if "cpu" in backends:
        return None
    return ",".join(f"{kind}:{backend}" for kind, backend in ({"cpu": "gloo"} | backends).items())


def go_over_hosts(device_types: Collection[str]) -> bool:
    """Whether messages between devices of these types go over the hosts' memory.

    They do where the process group has nothing better than gloo, which knows the host alone.
    """
    first, *others = set(device_types)
    return bool(others) or first == "cpu" or backends_of().get(first, "gloo") == "gloo"


def runs_on_device(group: dist.ProcessGroup) -> bool:
    """Whether any of a group's transfers run on a device, where no thread waits for them."""
    return any(
        device != "cpu" and backend != "gloo" for device, backend in backends_of(group).items()
    )


@contextlib.contextmanager
def errors_left_to_engine() -> Iterator[None]:
    """Groups made inside do not end the process when a transfer fails, unless the user says so.

    The engine tells the cause to all ranks, for which the process has to live.
    """
    is_own = _ERROR_HANDLING not in os.environ
    if is_own:
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
    try:
        yield
    finally:
        if is_own:
            os.environ.pop(_ERROR_HANDLING, None)


def options_of_messages(backend: str) -> Any:
    """Options of a group that carries messages, for torch; None: that backend's own.

    Messages come before all other work of the device, since another stage waits for them. Other
    groups of the user's and the library's keep their blocks: that is why it is no variable of the
    environment. The user's ``NCCL_MAX_CTAS`` comes first, for all groups.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if "NCCL_MAX_CTAS" not in os.environ:
        options.config.max_ctas = _MOST_BLOCKS
    return options
