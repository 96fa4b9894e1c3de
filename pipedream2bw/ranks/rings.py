"""Memory that two processes of one machine share, for the messages between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import _C
from ..errors import PeerLost
from .deadline import Deadline

_HOST = torch.device("cpu")
_REST_SECONDS = 1.0
_LOOK_SECONDS = 0.05

ChannelEnds = tuple[_C.Sender | None, _C.Receiver | None]
"""A process's end of a channel: one of the two."""

_Sender = TypeVar("_Sender", _C.SharedRing, _C.DeviceRingSender)
_Receiver = TypeVar("_Receiver")


@dataclasses.dataclass(frozen=True)
class DeviceRing:
    """This process's end of a ring in a device's memory, and whose the other one is.

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


def make_ring(
    group: dist.ProcessGroup, source: int, destination: int, num_slots: int, deadline: Deadline
) -> _C.SharedRing | None:
    """This process's end of memory shared by two ranks, None if they are not on one machine.

    Both ranks of the group call it.
    """
    seconds = deadline.seconds
    is_source = dist.get_rank() == source
    ring = _C.SharedRing.create(num_slots, seconds) if is_source else None
    ring, _ = _shared(
        ring,
        lambda address: _C.SharedRing.open(address, seconds),
        (source, destination),
        group,
        deadline,
    )
    return ring


def make_device_ring(
    group: dist.ProcessGroup,
    edge: tuple[int, int],
    device: torch.device,
    num_slots: int,
    deadline: Deadline,
) -> DeviceRing | None:
    """This process's end of memory shared by two ranks' devices, None if they cannot share any.

    Both ranks call it.

    Args:
        group: of hosts, that both ranks are in.
        edge: the ranks that send and receive.
        device: of this end's tensors.
        num_slots: messages that can be under way.
    """
    peer = edge[1] if dist.get_rank() == edge[0] else edge[0]
    options: Any = {"device": device, "peer_rank": peer, "timeout": deadline.seconds}
    sender: _C.DeviceRingSender | None = None
    if peer == edge[1]:
        sender = _C.DeviceRingSender.create(**options, num_slots=num_slots)
    end, process = _shared(
        sender,
        lambda address: _C.DeviceRingReceiver.open(address, **options),
        edge,
        group,
        deadline,
    )
    return DeviceRing(end, peer, process) if end else None


def _shared(
    sender: _Sender | None,
    open_there: Callable[[str], _Receiver | None],
    edge: tuple[int, int],
    group: dist.ProcessGroup,
    deadline: Deadline,
) -> tuple[_Sender | _Receiver | None, int]:
    """This process's end of memory that the first rank of an edge has made, and the peer's process.

    Both are told the same. Whether memory can be shared depends on the machine, its file systems,
    its containers and on which devices a process sees: so the receiver tries and tells.
    """
    source, destination = edge

    def tell(value: Any, to: int) -> None:
        told = [value, os.getpid()]
        send = functools.partial(dist.send_object_list, told, to, group=group, device=_HOST)
        deadline.wait("making a channel", send)

    def hear(of: int) -> list[Any]:
        told: list[Any] = [None, None]
        receive = functools.partial(dist.recv_object_list, told, of, group=group, device=_HOST)
        deadline.wait("making a channel", receive)
        return told

    if dist.get_rank() == source:
        tell(sender.address if sender else "", destination)
        is_open, process = hear(destination)
        return sender if is_open else None, process
    address, process = hear(source)
    receiver = open_there(address)
    tell(receiver is not None, source)
    return receiver, process


class PeerWatch:
    """Raises the fault when a process has ended and a device here does not come to rest after it.

    A device that waits for memory which a dead process would have written waits for ever. So do the
    threads that wait for the device. What the process sent before its end is received.
    """

    def __init__(self, fault: _C.Fault, rings: Sequence[DeviceRing]) -> None:
        self._fault = fault
        self._rings = {os.pidfd_open(ring.process): ring for ring in rings}  # by descriptor
        self._poll = select.poll()
        self._wake, self._woken = os.pipe()
        self._poll.register(self._wake, select.POLLIN | select.POLLHUP)
        for descriptor in self._rings:
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._watch, name="pd2 watches peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch and drops the channels' ends."""
        os.close(self._woken)
        self._thread.join()
        for descriptor in (self._wake, *self._rings):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._rings.clear()

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    return
                self._poll.unregister(descriptor)
                rank = self._rings[descriptor].rank
                if not _comes_to_rest(self._rings[descriptor].end):
                    text = "its process has ended, and this one's device waits for it"
                    self._fault.raise_(PeerLost(f"rank {rank}: {text}", rank=rank, cause=text))


def _comes_to_rest(end: _C.DeviceRingSender | _C.DeviceRingReceiver) -> bool:
    deadline = time.monotonic() + _REST_SECONDS
    while not end.is_idle:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
