"""The connections between this process's stages and others."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .grid import Edge, RankGrid, destroy_groups


class Channels:
    """Both directions of every edge that ends in this process; made once, shared by all wirings.

    In processes each direction of an edge has a two-rank group of its own, so that neither ever
    waits behind the other.
    """

    def __init__(
        self,
        grid: RankGrid,
        devices: Sequence[torch.device],
        in_flight: Sequence[int],
        timeout: float,
    ) -> None:
        self._grid = grid
        self._devices = devices
        self._in_flight = in_flight
        self._timeout = datetime.timedelta(seconds=timeout)
        self._groups: list[dist.ProcessGroup] = []
        self._ends: dict[tuple[int, int], tuple[_C.Sender | None, _C.Receiver | None]] = {}

    def make(self, edges: Sequence[Edge]) -> None:
        """Makes what is missing. Every rank calls it, with the same edges."""
        # torch numbers groups by how many a process has made, so all ranks make all groups, in
        # one order; a rank that is not in a group passes by at once.
        for producer, consumer in sorted(edges):
            for source, destination in ((producer, consumer), (consumer, producer)):
                if (source, destination) not in self._ends:
                    self._ends[source, destination] = self._direction(source, destination)

    def sender(self, source: int, destination: int) -> _C.Sender:
        sender = self._ends[source, destination][0]
        assert sender is not None
        return sender

    def receiver(self, source: int, destination: int) -> _C.Receiver:
        receiver = self._ends[source, destination][1]
        assert receiver is not None
        return receiver

    def _direction(
        self, source: int, destination: int
    ) -> tuple[_C.Sender | None, _C.Receiver | None]:
        grid = self._grid
        if not grid.in_processes or grid.share_a_rank(source, destination):
            channel = _C.LocalChannel(self._devices[destination])
            return channel, channel
        group: dist.ProcessGroup | None = None
        for shard, replica in itertools.product(range(grid.num_shards), range(grid.width)):
            ends = [grid.process_of(stage, replica, shard) for stage in (source, destination)]
            made = dist.new_group(sorted(ends), timeout=self._timeout)
            if isinstance(made, dist.ProcessGroup):
                self._groups.append(made)
                group = made
        if group is None:
            return None, None
        peers = (grid.process_of(source), grid.process_of(destination))
        # As many messages as can be under way before the receiver has to take one.
        most_under_way = max(self._in_flight) + 1
        devices = {self._devices[source].type, self._devices[destination].type}
        ring = (
            make_ring(group, *peers, most_under_way, self._timeout) if devices == {"cpu"} else None
        )
        own = source if source in grid.stages else destination
        return end_of_channel(group, *peers, self._devices[own], most_under_way, ring)

    def close(self) -> None:
        """Drops the channels and their connections; peers that wait get an error."""
        self._ends.clear()
        destroy_groups(self._groups)
        self._groups.clear()


def end_of_channel(
    group: dist.ProcessGroup,
    source: int,
    destination: int,
    device: torch.device,
    most_under_way: int,
    ring: _C.SharedRing | None,
) -> tuple[_C.Sender | None, _C.Receiver | None]:
    """This process's end of a channel from one rank of a group to another: one of the two."""
    is_source = dist.get_rank() == source
    peer = destination if is_source else source
    options: dict[str, Any] = {
        "group": group.group_name,
        "peer": dist.get_group_rank(group, peer),
        "peer_rank": peer,
        "device": device,
        "ring": ring,
    }
    if is_source:
        return _C.ProcessGroupSender(**options, max_unawaited=most_under_way), None
    return None, _C.ProcessGroupReceiver(**options, posted_ahead=2)


def make_ring(
    group: dist.ProcessGroup,
    source: int,
    destination: int,
    num_slots: int,
    timeout: datetime.timedelta,
) -> _C.SharedRing | None:
    """This process's end of memory shared by two ranks, None if they are not on one machine.

    Both ranks of the group call it. Some file systems and containers let a rank see another one's
    memory and some do not, so the receiver tries and tells.
    """
    is_source = dist.get_rank() == source
    ring = _C.SharedRing.create(num_slots, timeout.total_seconds()) if is_source else None
    told: list[Any] = [ring.address if ring else ""]
    dist.broadcast_object_list(told, src=source, group=group)
    if not is_source:
        ring = _C.SharedRing.open(told[0], timeout.total_seconds())
    told = [ring is not None]
    dist.broadcast_object_list(told, src=destination, group=group)
    return ring if told[0] else None
