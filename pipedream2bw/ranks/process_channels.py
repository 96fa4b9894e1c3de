"""The channels between processes: over groups, or memory that both share."""

from __future__ import annotations

import dataclasses
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
)
from .rings import ChannelEnds, DeviceRing, PeerWatch, agreed_by_all, make_device_ring, make_ring


@dataclasses.dataclass(eq=False)
class ProcessChannels:
    """Makes channels between stages of different processes.

    Each direction of an edge has a two-rank group of its own, so that neither ever waits behind the
    other.

    A device's group knows the device's tensors alone, so headers go over the control group. Its
    connections are made here, in one order on all ranks: made by the first messages, two ranks that
    both send first would wait for each other.

    Messages between devices go through memory of the devices that both processes share, where all
    replicas' processes of the edge can do that; else over a group of the devices; and where there
    is none, over the hosts' memory.

    Attributes:
        devices: of each stage.
        most_under_way: messages that can be sent before the receiver has to take one.
        control: the group of all ranks' hosts.
        deadline: ends waiting for other ranks.
    """

    grid: RankGrid
    _: dataclasses.KW_ONLY
    devices: Sequence[torch.device]
    most_under_way: int
    control: dist.ProcessGroup
    deadline: Deadline

    def __post_init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._watches: list[PeerWatch] = []
        self._unconnected: list[_C.ProcessGroupSender | _C.ProcessGroupReceiver] = []

    def make_rings(self, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], ChannelEnds]:
        """Joins devices by memory that they share; gives the edges where all ranks could.

        With this process's ends. Every rank calls it alike.
        """
        grid, control = self.grid, self.control
        between_devices = [
            (source, destination)
            for source, destination in edges
            if not grid.share_a_rank(source, destination)
            and self.devices[source].type == self.devices[destination].type != "cpu"
        ]
        if not between_devices:
            return {}
        made: dict[tuple[int, int], DeviceRing | None] = {}
        for edge in between_devices:
            peers = (grid.process_of(edge[0]), grid.process_of(edge[1]))
            if dist.get_rank() in peers:
                device = self.devices[edge[peers.index(dist.get_rank())]]
                made[edge] = make_device_ring(
                    control, peers, device, self.most_under_way, self.deadline
                )
        can = [edge not in made or made[edge] is not None for edge in between_devices]
        agreed = agreed_by_all(can, control, self.deadline)
        ends: dict[tuple[int, int], ChannelEnds] = {}
        watch = PeerWatch(self.deadline.fault)
        for edge, is_so in zip(between_devices, agreed, strict=True):
            if is_so:
                ends[edge] = (None, None)
                if (ring := made.get(edge)) is not None:
                    watch.add(ring)
                    ends[edge] = ring.ends
        watch.start()
        self._watches.append(watch)
        return ends

    def make(self, source: int, destination: int) -> ChannelEnds:
        """This process's ends of a channel; to be connected. Every rank calls it alike."""
        edge = (source, destination)
        ends = (self.devices[source], self.devices[destination])
        on_hosts = go_over_hosts({device.type for device in ends})
        backend = backends_of().get("cpu" if on_hosts else ends[0].type, "gloo")
        group = new_group(
            self.grid.teams_of(edge),
            self.deadline,
            backend,
            None if on_hosts else TIMEOUT,
            None if on_hosts else options_of_messages(backend),
        )
        if group is None:
            return None, None
        self._groups.append(group)
        peers = (self.grid.process_of(source), self.grid.process_of(destination))
        ring, headers = None, None
        if on_hosts:
            ring = make_ring(group, *peers, self.most_under_way, self.deadline)
        else:
            headers = (self.control, source * self.grid.num_stages + destination)
        device = ends[peers.index(dist.get_rank())]
        own = end_of_channel(
            group,
            *peers,
            device,
            self.most_under_way,
            fault=self.deadline.fault,
            ring=ring,
            headers=headers,
        )
        if not on_hosts:
            self._unconnected += [
                end
                for end in own
                if isinstance(end, (_C.ProcessGroupSender, _C.ProcessGroupReceiver))
            ]
        return own

    def connect(self) -> None:
        """Connects what has been made. Every rank calls it."""
        for end in self._unconnected:
            self.deadline.wait("connecting stages", end.connect)
        self._unconnected.clear()

    def close_watches(self) -> None:
        """Peers that wait for this process get an error."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()

    def close(self) -> None:
        """Drops the connections, when the channels are gone."""
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
