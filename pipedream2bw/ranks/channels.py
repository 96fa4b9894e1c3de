"""The connections between this process's stages and others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import _C
from .deadline import Deadline
from .grid import RankGrid
from .groups import (
    TIMEOUT,
    backends_of,
    destroy_groups,
    go_over_hosts,
    new_group,
    options_of_messages,
    told_by_all,
)
from .rings import ChannelEnds, DeviceRing, PeerWatch, make_device_ring, make_ring


class Channels:
    """Both directions of every edge that ends in this process; made once, shared by all wirings.

    Between processes each direction of an edge has a two-rank group of its own, so that neither
    ever waits behind the other.

    A device's group knows the device's tensors alone, so headers go over the control group. Its
    connections are made here, in one order on all ranks: made by the first messages, two ranks that
    both send first would wait for each other.

    Messages between devices go through memory of the devices that both processes share, where all
    replicas' processes of the edge can do that; else over a group of the devices; and where there
    is none, over the hosts' memory.

    Args:
        devices: of each stage.
        in_flight: most microbatches in flight on each stage.
        control: the group of all ranks' hosts, None in one process.
        deadline: ends waiting for other ranks.

    Attributes:
        senders, receivers: this process's ends, by source and destination.
    """

    def __init__(
        self,
        grid: RankGrid,
        *,
        devices: Sequence[torch.device],
        in_flight: Sequence[int],
        control: dist.ProcessGroup | None,
        deadline: Deadline,
    ) -> None:
        self._grid = grid
        self._devices = devices
        self._control = control
        self._deadline = deadline
        # As many messages as can be sent before the receiver has to take one.
        self._most_under_way = max(in_flight) + 1
        self._made: set[tuple[int, int]] = set()
        self.senders: dict[tuple[int, int], _C.Sender] = {}
        self.receivers: dict[tuple[int, int], _C.Receiver] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._watches: list[PeerWatch] = []
        self._unconnected: list[_C.ProcessGroupSender | _C.ProcessGroupReceiver] = []

    def make(self, edges: Sequence[tuple[int, int]]) -> None:
        """Makes what is missing between producers and consumers. Every rank calls it alike."""
        missing = [
            edge
            for producer, consumer in sorted(edges)
            for edge in ((producer, consumer), (consumer, producer))
            if edge not in self._made
        ]
        with_rings = self._make_rings(missing)
        for edge in missing:
            if edge not in with_rings:
                self._make(*edge)
        self._made.update(missing)
        for end in self._unconnected:
            self._deadline.wait("connecting stages", end.connect)
        self._unconnected.clear()

    def _is_between_processes(self, source: int, destination: int) -> bool:
        return self._grid.in_processes and not self._grid.share_a_rank(source, destination)

    def _make_rings(self, edges: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Joins devices by memory that they share; gives the edges where all ranks could."""
        between_devices = [
            (source, destination)
            for source, destination in edges
            if self._is_between_processes(source, destination)
            and self._devices[source].type == self._devices[destination].type != "cpu"
        ]
        if not between_devices:
            return set()
        assert self._control is not None
        made: dict[tuple[int, int], DeviceRing | None] = {}
        for edge in between_devices:
            peers = (self._grid.process_of(edge[0]), self._grid.process_of(edge[1]))
            if dist.get_rank() in peers:
                device = self._devices[edge[peers.index(dist.get_rank())]]
                made[edge] = make_device_ring(
                    self._control, peers, device, self._most_under_way, self._deadline
                )
        can = [edge not in made or made[edge] is not None for edge in between_devices]
        everyone = told_by_all(can, self._control, self._deadline, "making a channel")
        agreed = map(all, zip(*everyone, strict=True))
        with_rings = {edge for edge, is_so in zip(between_devices, agreed, strict=True) if is_so}
        rings = {edge: ring for edge, ring in made.items() if ring and edge in with_rings}
        for edge, ring in rings.items():
            self._keep(edge, ring.ends)
        self._watches.append(PeerWatch(self._deadline.fault, list(rings.values())))
        return with_rings

    def _make(self, source: int, destination: int) -> None:
        edge = (source, destination)
        ends = (self._devices[source], self._devices[destination])
        if not self._is_between_processes(source, destination):
            channel = _C.LocalChannel(source=ends[0], destination=ends[1])
            self._keep(edge, (channel, channel))
            return
        on_hosts = go_over_hosts({device.type for device in ends})
        backend = backends_of().get("cpu" if on_hosts else ends[0].type, "gloo")
        group = new_group(
            self._grid.teams_of(edge),
            self._deadline,
            backend,
            None if on_hosts else TIMEOUT,
            None if on_hosts else options_of_messages(backend),
        )
        if group is None:
            return
        self._groups.append(group)
        peers = (self._grid.process_of(source), self._grid.process_of(destination))
        ring, headers = None, None
        if on_hosts:
            ring = make_ring(group, *peers, self._most_under_way, self._deadline)
        else:
            assert self._control is not None
            headers = (self._control, source * self._grid.num_stages + destination)
        own = end_of_channel(
            group,
            *peers,
            ends[peers.index(dist.get_rank())],
            self._most_under_way,
            fault=self._deadline.fault,
            ring=ring,
            headers=headers,
        )
        self._keep(edge, own)
        for end in own if not on_hosts else ():
            if isinstance(end, (_C.ProcessGroupSender, _C.ProcessGroupReceiver)):
                self._unconnected.append(end)

    def _keep(self, edge: tuple[int, int], ends: ChannelEnds) -> None:
        sender, receiver = ends
        if sender is not None:
            self.senders[edge] = sender
        if receiver is not None:
            self.receivers[edge] = receiver

    def close(self) -> None:
        """Drops the channels, and then their connections; peers that wait get an error."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
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
    *,
    fault: _C.Fault,
    ring: _C.SharedRing | None = None,
    headers: tuple[dist.ProcessGroup, int] | None = None,
) -> ChannelEnds:
    """This process's end of a channel from one rank of a group to another.

    Args:
        device: of this end's tensors.
        fault: is raised where a message cannot be sent and no call is there to say so.
        ring: memory that both ranks share.
        headers: for a group of devices: a group of hosts, and a tag of this channel's own there.
            None: the group is one of hosts.
    """
    is_source = dist.get_rank() == source
    peer = destination if is_source else source
    on_hosts = headers is None
    is_staged = on_hosts and device.type != "cpu"
    way_of_headers = None
    if headers is not None:
        hosts, tag = headers
        way_of_headers = (hosts.group_name, dist.get_group_rank(hosts, peer), tag)
    other = _C.Peer(
        group=group.group_name,
        number=dist.get_group_rank(group, peer),
        rank=peer,
        device=torch.device("cpu") if on_hosts else device,
        ring=ring,
        headers=way_of_headers,
        pins_memory=is_staged and not is_source,
    )
    if is_source:
        sender = _C.ProcessGroupSender(peer=other, max_unawaited=most_under_way)
        if is_staged:
            return _C.StagedSender(hosts=sender, device=device, fault=fault), None
        return sender, None
    # What a device waits for holds up all that it is given later, so the engine says when.
    posted_ahead = 2 if on_hosts else 0
    receiver = _C.ProcessGroupReceiver(peer=other, posted_ahead=posted_ahead)
    return None, _C.StagedReceiver(hosts=receiver, device=device) if is_staged else receiver
