"""The connections between this process's stages and others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .deadline import Deadline
from .grid import RankGrid, destroy_groups, new_group


class Channels:
    """Both directions of every edge that ends in this process; made once, shared by all wirings.

    In processes each direction of an edge has a two-rank group of its own, so that neither ever
    waits behind the other.

    Attributes:
        senders, receivers: this process's ends, by source and destination.
    """

    def __init__(
        self,
        grid: RankGrid,
        devices: Sequence[torch.device],
        in_flight: Sequence[int],
        deadline: Deadline,
    ) -> None:
        self._grid = grid
        self._devices = devices
        self._in_flight = in_flight
        self._deadline = deadline
        self._groups: list[dist.ProcessGroup] = []
        self._made: set[tuple[int, int]] = set()
        self.senders: dict[tuple[int, int], _C.Sender] = {}
        self.receivers: dict[tuple[int, int], _C.Receiver] = {}

    def make(self, edges: Sequence[tuple[int, int]]) -> None:
        """Makes what is missing between producers and consumers. Every rank calls it alike."""
        for producer, consumer in sorted(edges):
            for source, destination in ((producer, consumer), (consumer, producer)):
                if (source, destination) not in self._made:
                    self._make(source, destination)
                    self._made.add((source, destination))

    def _make(self, source: int, destination: int) -> None:
        grid = self._grid
        edge = (source, destination)
        if not grid.in_processes or grid.share_a_rank(source, destination):
            channel = _C.LocalChannel(self._devices[destination])
            self.senders[edge], self.receivers[edge] = channel, channel
            return
        group = new_group(grid.teams_of(edge), self._deadline)
        if group is None:
            return
        self._groups.append(group)
        peers = (grid.process_of(source), grid.process_of(destination))
        # As many messages as can be under way before the receiver has to take one.
        most_under_way = max(self._in_flight) + 1
        devices = {self._devices[source].type, self._devices[destination].type}
        ring = None
        if devices == {"cpu"}:
            ring = make_ring(group, *peers, most_under_way, self._deadline)
        own = self._devices[source if source in grid.stages else destination]
        sender, receiver = end_of_channel(group, *peers, own, most_under_way, ring)
        if sender is not None:
            self.senders[edge] = sender
        if receiver is not None:
            self.receivers[edge] = receiver

    def close(self) -> None:
        """Drops the channels and their connections; peers that wait get an error."""
        self.senders.clear()
        self.receivers.clear()
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
    deadline: Deadline,
) -> _C.SharedRing | None:
    """This process's end of memory shared by two ranks, None if they are not on one machine.

    Both ranks of the group call it. Some file systems and containers let a rank see another one's
    memory and some do not, so the receiver tries and tells.
    """
    is_source = dist.get_rank() == source
    ring = _C.SharedRing.create(num_slots, deadline.seconds) if is_source else None
    told: list[Any] = [ring.address if ring else ""]
    tell = functools.partial(dist.broadcast_object_list, told, group=group)
    deadline.wait("making a channel", functools.partial(tell, src=source))
    if not is_source:
        ring = _C.SharedRing.open(told[0], deadline.seconds)
    told[0] = ring is not None
    deadline.wait("making a channel", functools.partial(tell, src=destination))
    return ring if told[0] else None
