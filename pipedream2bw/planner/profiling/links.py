"""Measures latency and bandwidth between all pairs of ranks, and the time of sums over ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics

import torch
import torch.distributed as dist

from ...ranks.channels import end_of_channel
from ...ranks.deadline import Deadline
from ...ranks.groups import go_over_hosts, new_group
from ...ranks.rings import ChannelEnds, make_device_ring, make_ring
from .profile import Profile, ProfiledLinks
from .timing import median_seconds

_SMALL_BYTES = 64
_ROUND_TRIPS = 21
_UNDER_WAY = 4
_SUMS = 5
_SMALLEST_MESSAGE, _LARGEST_MESSAGE = 64 * 2**10, 16 * 2**20

# Replicas add up their gradients in buckets of 25 MiB or less.
_SUM_BYTES = (64 * 2**10, 2**20, 8 * 2**20, 25 * 2**20)


def with_links(
    profile: Profile, group: dist.ProcessGroup, device: torch.device, deadline: Deadline
) -> Profile:
    """Adds the links of these processes to a profile. All ranks of the default group call this."""
    links = _measured_links(group, device, _typical_message(profile), deadline)
    all_reduce = _measured_all_reduce(group, device, deadline)
    return dataclasses.replace(profile, links=links, all_reduce=all_reduce)


def _typical_message(profile: Profile) -> int:
    """The median of the largest microbatch's bytes that cross a possible cut, within limits."""
    edges = profile.microbatches[-1].edges
    crossing = [
        sum({p: size for p, consumer, size in edges if p <= index < consumer}.values())
        for index, layer in enumerate(profile.layers)
        if layer.can_cut_after
    ]
    typical = int(statistics.median(crossing)) if crossing else 0
    return min(max(typical, _SMALLEST_MESSAGE), _LARGEST_MESSAGE)


def _measured_links(
    group: dist.ProcessGroup, device: torch.device, message_bytes: int, deadline: Deadline
) -> ProfiledLinks:
    """Sends messages both ways between every two ranks, over the channels that stages use.

    All ranks of the default group call this. Pairs are measured in rounds in which every rank is in
    one pair, as in a tournament: so a pair shares its machines only with pairs that would also be
    there in a pipeline. A link counts as equal in both directions.

    Args:
        message_bytes: the larger of the two sizes that distinguish latency from bandwidth.
    """
    world = dist.get_world_size()
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    for pairs in rounds_of_pairs(world):
        for pair in pairs:  # every rank makes all groups, in one order
            made = new_group([pair], deadline)
            if made is not None:
                mine[pair] = _measured_pair(made, group, pair, device, message_bytes, deadline)
                dist.destroy_process_group(made)
        deadline.wait("measuring links", lambda: dist.barrier(group=group))
    everyone: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in range(world)]
    deadline.wait("measuring links", lambda: dist.all_gather_object(everyone, mine, group=group))
    # For each pair the lower rank's measurement counts.
    measured = {pair: everyone[pair[0]][pair] for found in everyone for pair in found}
    latency = [[0.0] * world for _ in range(world)]
    bandwidth = [[math.inf] * world for _ in range(world)]
    for (a, b), (seconds, rate) in measured.items():
        latency[a][b] = latency[b][a] = seconds
        bandwidth[a][b] = bandwidth[b][a] = rate
    return ProfiledLinks(tuple(map(tuple, latency)), tuple(map(tuple, bandwidth)))


def _measured_pair(
    group: dist.ProcessGroup,
    hosts: dist.ProcessGroup,
    pair: tuple[int, int],
    device: torch.device,
    message_bytes: int,
    deadline: Deadline,
) -> tuple[float, float]:
    """Seconds of a message without content, and bytes per second; both ranks of a pair call it.

    The channels end with the call, and so before the group that they send over.
    """
    leads = dist.get_rank() == pair[0]
    ends: list[ChannelEnds] = []
    for source, destination in (pair, pair[::-1]):
        shared = None
        if device.type != "cpu":
            shared = make_device_ring(hosts, (source, destination), device, _UNDER_WAY, deadline)
        if shared is not None:
            ends.append(shared.ends)
            continue
        ring, headers = None, None
        if go_over_hosts({device.type}):
            ring = make_ring(group, source, destination, _UNDER_WAY, deadline)
        else:
            headers = (hosts, source)
        ends.append(
            end_of_channel(
                group,
                source,
                destination,
                device,
                _UNDER_WAY,
                fault=deadline.fault,
                ring=ring,
                headers=headers,
            )
        )
    (sender, _), (_, receiver) = ends if leads else ends[::-1]
    assert sender is not None
    assert receiver is not None

    def message_seconds(layout: int, size: int) -> float:
        content = [torch.zeros(size, dtype=torch.uint8, device=device)]

        def round_trip() -> None:
            receiver.expect(layout)
            if leads:
                sender.send(layout, content)
            received = receiver.receive()
            if not leads:
                sender.send(layout, received)

        return median_seconds(round_trip, device, times=_ROUND_TRIPS, warmup=2) / 2

    small, large = message_seconds(0, _SMALL_BYTES), message_seconds(1, message_bytes)
    # If the larger one is no slower, the clock cannot measure the bandwidth.
    rate = (message_bytes - _SMALL_BYTES) / max(large - small, 1e-9)
    return max(0.0, small - _SMALL_BYTES / rate), rate


def _add_in_order(flat: torch.Tensor, room: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Does what replicas do: pieces go to the rank that adds them, and their sums to all.

    The group's ranks are the first ones.
    """
    dist.all_to_all_single(room, flat, group=group)
    sums = flat.view(dist.get_world_size(group), -1)
    torch.sum(room.view_as(sums), 0, out=sums[dist.get_rank(group)])
    for rank, each in enumerate(sums):
        dist.broadcast(each, rank, group=group)


def _measured_all_reduce(
    group: dist.ProcessGroup, device: torch.device, deadline: Deadline
) -> tuple[tuple[int, int, float], ...]:
    """(ranks, bytes, seconds) of sums over the first 2, 4, 8, ... ranks, and over all of them.

    All ranks of the default group call this; the slowest rank's median counts.
    """
    world = dist.get_world_size()
    found: list[tuple[int, int, float]] = []
    powers = [2**k for k in range(1, world.bit_length()) if 2**k < world]
    for count in (*powers, world):
        made = new_group([range(count)], deadline)
        for size in _SUM_BYTES:
            seconds = 0.0
            if made is not None:
                flat = torch.zeros(size // 4 // count * count, device=device)
                add_up = functools.partial(_add_in_order, flat, torch.empty_like(flat), made)
                seconds = median_seconds(add_up, device, times=_SUMS, warmup=2)
            slowest = torch.tensor([seconds], dtype=torch.float64)
            slow = functools.partial(dist.all_reduce, slowest, dist.ReduceOp.MAX, group=group)
            deadline.wait("measuring sums", slow)
            found.append((count, size, float(slowest)))
        if made is not None:
            dist.destroy_process_group(made)
    return tuple(found)


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Rounds that have every pair of ``count`` ranks once, and each rank in at most one pair.

    The circle method: one rank stays, the others go round it.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(
            sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None)
        )
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
