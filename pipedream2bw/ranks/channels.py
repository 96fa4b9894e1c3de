"""The connections between this process's stages and others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import _C
from .deadline import Deadline
from .grid import RankGrid
from .process_channels import ProcessChannels


class Channels:
    """Both directions of every edge that ends in this process; made once, shared by all wirings.

    Args:
        devices: of each stage.
        in_flight: most microbatches in flight on each stage.
        control: the group of all ranks' hosts, None in one process.

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
        self._made: set[tuple[int, int]] = set()
        self.senders: dict[tuple[int, int], _C.Sender] = {}
        self.receivers: dict[tuple[int, int], _C.Receiver] = {}
        self._between = None
        if grid.in_processes:
            assert control is not None
            # As many messages as can be sent before the receiver has to take one.
            most_under_way = max(in_flight) + 1
            self._between = ProcessChannels(
                grid,
                devices=devices,
                most_under_way=most_under_way,
                control=control,
                deadline=deadline,
            )

    def make(self, edges: Sequence[tuple[int, int]]) -> None:
        """Makes what is missing between producers and consumers. Every rank calls it alike."""
        missing = [
            edge
            for producer, consumer in sorted(edges)
            for edge in ((producer, consumer), (consumer, producer))
            if edge not in self._made
        ]
        between = self._between
        with_rings = {} if between is None else between.make_rings(missing)
        for edge in missing:
            if edge in with_rings:
                self._keep(edge, *with_rings[edge])
            else:
                self._make(*edge)
        self._made.update(missing)
        if between is not None:
            between.connect()

    def _make(self, source: int, destination: int) -> None:
        edge = (source, destination)
        if self._between is not None and not self._grid.share_a_rank(source, destination):
            self._keep(edge, *self._between.make(source, destination))
            return
        devices = self._devices
        channel = _C.LocalChannel(source=devices[source], destination=devices[destination])
        self.senders[edge], self.receivers[edge] = channel, channel

    def _keep(
        self, edge: tuple[int, int], sender: _C.Sender | None, receiver: _C.Receiver | None
    ) -> None:
        if sender is not None:
            self.senders[edge] = sender
        if receiver is not None:
            self.receivers[edge] = receiver

    def close(self) -> None:
        """Drops the channels and their connections; peers that wait get an error."""
        if self._between is not None:
            self._between.close_watches()
        self.senders.clear()
        self.receivers.clear()
        if self._between is not None:
            self._between.close()
