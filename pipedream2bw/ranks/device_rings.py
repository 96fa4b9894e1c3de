"""Memory of a device that two processes of one machine share, for the messages between them."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .deadline import Deadline

_HOST = torch.device("cpu")

ChannelEnds = tuple[_C.Sender | None, _C.Receiver | None]
"""A process's end of a channel: one of the two."""


@dataclasses.dataclass(frozen=True)
class DeviceRing:
    """This process's end of a ring, and whose the other one is.

    Attributes:
        rank: of the other end.
        process: its number on this machine.
    """

    end: _C.DeviceRingSender | _C.DeviceRingReceiver
    rank: int
    process: int

    @property
    def ends(self) -> ChannelEnds:
        """The end as that which sends or that which receives."""
        if isinstance(self.end, _C.DeviceRingSender):
            return self.end, None
        return None, self.end


def make_device_ring(
    group: dist.ProcessGroup,
    edge: tuple[int, int],
    device: torch.device,
    num_slots: int,
    deadline: Deadline,
) -> DeviceRing | None:
    """This process's end of memory shared by two ranks' devices, None if they cannot share any.

    Both ranks call it, and are told the same. Whether a device can reach another one's memory
    depends on the machine, on its containers and on which devices a process sees: the receiver
    tries.

    Args:
        group: of hosts, that both ranks are in.
        edge: the ranks that send and receive.
        device: of this end's tensors.
        num_slots: messages that can be under way.
    """
    source, destination = edge
    if dist.get_rank() == source:
        sender = _C.DeviceRingSender.create(
            device=device, num_slots=num_slots, peer_rank=destination, timeout=deadline.seconds
        )
        _send([sender.address if sender else "", os.getpid()], destination, group, deadline)
        is_open, process = _received(source=destination, group=group, deadline=deadline)
        return DeviceRing(sender, destination, process) if sender and is_open else None
    address, process = _received(source=source, group=group, deadline=deadline)
    receiver = _C.DeviceRingReceiver.open(
        address, device=device, peer_rank=source, timeout=deadline.seconds
    )
    _send([receiver is not None, os.getpid()], source, group, deadline)
    return DeviceRing(receiver, source, process) if receiver else None


def _send(told: list[Any], to: int, group: dist.ProcessGroup, deadline: Deadline) -> None:
    send = functools.partial(dist.send_object_list, told, to, group=group, device=_HOST)
    deadline.wait("making a channel", send)


def _received(source: int, group: dist.ProcessGroup, deadline: Deadline) -> list[Any]:
    told: list[Any] = [None, None]
    receive = functools.partial(dist.recv_object_list, told, source, group=group, device=_HOST)
    deadline.wait("making a channel", receive)
    return told


def agreed_by_all(found: list[bool], group: dist.ProcessGroup, deadline: Deadline) -> list[bool]:
    """By place whether it is true on all ranks of the group, each of which calls it."""
    flags = torch.tensor(found, dtype=torch.uint8)
    reduce = functools.partial(dist.all_reduce, flags, dist.ReduceOp.MIN, group=group)
    deadline.wait("making a channel", reduce)
    return [bool(flag) for flag in flags.tolist()]
