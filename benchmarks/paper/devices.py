"""Devices and links: makers' figures, and the two constants that are fitted.

The paper's machines are p3.16xlarge: eight V100 of 16 GB with NVLink, 25 Gbit/s between servers.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Servers of equal devices. Bandwidths are in bytes per second and direction."""

    name: str
    flops: float  # of a device, at half precision
    memory_bandwidth: float
    memory: float  # bytes that a program can use
    devices_per_server: int
    inside: float  # all of a device's links to its server's other devices
    pair: float  # between two of its devices
    between: float  # all of a server's links to other servers
    latency: float  # seconds of a message, or of a step of a ring


# Of the 16 GB the driver's context, NCCL's buffers and the allocator's gaps take about one.
# NVLink: six links of 25 GB/s a device. Ethernet: 25 Gbit/s, of which 1448 of 1538 bytes are data.
P3_16XLARGE = Cluster(
    "p3.16xlarge",
    flops=125e12,
    memory_bandwidth=900e9,
    memory=16e9 - 1e9,
    devices_per_server=8,
    inside=150e9,
    pair=25e9,
    between=25e9 / 8 * 1448 / 1538,
    latency=20e-6,
)
# Zero bubble's: A100 of 80 GB; its eight stages are in one server.
A100_SERVER = Cluster(
    "8 A100",
    flops=312e12,
    memory_bandwidth=2039e9,
    memory=80e9 - 2e9,
    devices_per_server=8,
    inside=300e9,
    pair=300e9,
    between=4 * 200e9 / 8,
    latency=20e-6,
)
# 400 Gbit/s for each device between servers; 4 of the 80 GB are the program's.
H100_CLUSTER = Cluster(
    "servers of 8 H100",
    flops=989e12,
    memory_bandwidth=3.35e12,
    memory=80e9 - 4e9,
    devices_per_server=8,
    inside=450e9,
    pair=450e9,
    between=8 * 400e9 / 8,
    latency=10e-6,
)


@dataclasses.dataclass(frozen=True)
class Constants:
    """What is fitted."""

    efficiency: float  # of the peak, in large matrix products and all that goes with them
    launch: float  # seconds of a block's forward, or of half its backward, however small

    def block_seconds(self, cluster: Cluster, flops: float) -> float:
        """One pass of one block on one device."""
        return flops / (self.efficiency * cluster.flops) + self.launch


def ring_seconds(members: int, size: float, bandwidth: float, latency: float) -> float:
    """All-reduce of ``size`` bytes by a ring."""
    steps = 2 * (members - 1)
    return steps / members * size / bandwidth + steps * latency
