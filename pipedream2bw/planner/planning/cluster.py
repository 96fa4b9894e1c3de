"""Devices that a plan may use, and the links between them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from ...checks import check_number, check_whole_number
from ...units import parse_bandwidth, parse_bytes, parse_seconds
from ..profiling.profile import ProfiledLinks

MOST_DEVICES = 2**16
"""The most devices of a cluster: a plan for these is found in about a second."""

Amount = str | float
"""A number in bytes, bytes per second or seconds, or a text with a unit."""

Link = tuple[float, float]
"""A link as seconds of latency and bytes per second."""


@dataclasses.dataclass(frozen=True)
class DeviceType:
    """Devices of one kind.

    Attributes:
        name: of the kind.
        count: how many there are.
        memory: of one; None: that of :func:`plan`'s ``memory``.
        throughput: of the model, over that of the profiled device: of a table of throughputs by
            type (Gavel, OSDI 2020) the quotient.
        price_per_hour: of one. Or a list of (hours from now, price) as spot prices change, the
            first at hour 0.
    """

    name: str
    count: int
    memory: Amount | None = None
    throughput: float = 1.0
    price_per_hour: float | Sequence[tuple[float, float]] = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"device type: name: {self.name!r} given, it must be a str")
        where = f"device type {self.name}"
        check_whole_number(f"{where}: count", self.count, at_most=MOST_DEVICES)
        check_number(f"{where}: throughput", self.throughput, below=math.inf)
        if self.memory is not None:
            parse_bytes(f"{where}: memory", self.memory)
        _check_prices(f"{where}: price_per_hour", self.price_per_hour)

    def prices(self) -> list[tuple[float, float]]:
        """(hour, price), the first at hour 0."""
        if isinstance(self.price_per_hour, (int, float)):
            return [(0.0, float(self.price_per_hour))]
        return [(float(hour), float(price)) for hour, price in self.price_per_hour]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and links; made by :meth:`servers`, :meth:`mesh` or :meth:`measured`.

    Devices are numbered by type, in the order of ``types``; links go by these numbers.

    Attributes:
        types: of its devices.
        topology: "servers", "mesh" or "matrix".
        sizes: devices per server; or rows and columns.
        links: inside a server and outside; or of rows and of columns; or of every two devices.
    """

    types: tuple[DeviceType, ...]
    topology: str
    sizes: tuple[int, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        check_whole_number("devices", self.num_devices, at_most=MOST_DEVICES)
        for size in self.sizes:
            check_whole_number(f"{self.topology}: sizes", size, at_most=MOST_DEVICES)
        if self.topology == "mesh" and math.prod(self.sizes) != self.num_devices:
            rows, columns = self.sizes
            raise ValueError(
                f"rows: {rows}, columns: {columns}, devices: {self.num_devices}: rows * columns "
                "must be the number of devices"
            )
        needed = self.num_devices**2 if self.topology == "matrix" else 2
        if len(self.links) != needed:
            raise ValueError(
                f"links: {len(self.links)}, topology: {self.topology!r}, devices: "
                f"{self.num_devices}: it must have {needed}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of all types."""
        return sum(each.count for each in self.types)

    @classmethod
    def servers(
        cls,
        devices: int | Sequence[DeviceType],
        *,
        devices_per_server: int,
        inside: Amount,
        outside: Amount,
        inside_latency: Amount = 0.0,
        outside_latency: Amount = 0.0,
    ) -> Cluster:
        """Servers with fast links inside and slow ones between them.

        Args:
            devices: how many, or their types.
            devices_per_server: devices 0 ... devices_per_server - 1 are the first one's.
            inside, outside: bandwidths in each direction, like "25GB/s".
            inside_latency, outside_latency: of a message, like "5us".

        Raises:
            ValueError, TypeError: names the field, what was given and what is allowed.
        """
        check_whole_number("devices_per_server", devices_per_server, at_most=MOST_DEVICES)
        links = (
            _link("inside", inside, inside_latency),
            _link("outside", outside, outside_latency),
        )
        return cls(_types(devices), "servers", (devices_per_server,), links)

    @classmethod
    def mesh(
        cls,
        rows: int,
        columns: int,
        *,
        row: Amount,
        column: Amount,
        row_latency: Amount = 0.0,
        column_latency: Amount = 0.0,
        devices: int | Sequence[DeviceType] | None = None,
    ) -> Cluster:
        """Rows and columns that are each a network of their own (HammingMesh, SC 2022).

        A plan's depth lies along one dimension and its width along the other, whichever is faster.

        Args:
            rows, columns: device r * columns + c is in row r and column c.
            row, column: bandwidths between devices of one row, and of one column.
            row_latency, column_latency: of a message.
            devices: their types; None: all alike.

        Raises:
            ValueError, TypeError: as :meth:`servers`.
        """
        check_whole_number("rows", rows, at_most=MOST_DEVICES)
        check_whole_number("columns", columns, at_most=MOST_DEVICES)
        types = _types(rows * columns if devices is None else devices)
        links = (_link("row", row, row_latency), _link("column", column, column_latency))
        return cls(types, "mesh", (rows, columns), links)

    @classmethod
    def measured(
        cls,
        latency: Sequence[Sequence[float]],
        bandwidth: Sequence[Sequence[float]],
        devices: int | Sequence[DeviceType] | None = None,
    ) -> Cluster:
        """Links as measured between every two devices; a plan chooses which device does what.

        Args:
            latency: seconds, [devices][devices].
            bandwidth: bytes per second, [devices][devices]; the diagonals are not read.
            devices: their types; None: all alike.

        Raises:
            ValueError, TypeError: as :meth:`servers`.
        """
        for name, rows in (("latency", latency), ("bandwidth", bandwidth)):
            if not is_list(rows) or not all(map(is_list, rows)):
                raise TypeError(f"{name}: {rows!r} given, it must be a list of lists of numbers")
        types = _types(len(latency) if devices is None else devices)
        count = sum(each.count for each in types)
        for name, rows in (("latency", latency), ("bandwidth", bandwidth)):
            sizes = {len(rows), *(len(row) for row in rows)}
            if sizes != {count}:
                raise ValueError(
                    f"{name}: {len(rows)} rows of {sorted({len(row) for row in rows})} numbers, "
                    f"devices: {count}: one row for each, with one number for each"
                )
        links = [
            _link(f"links[{a}][{b}]", bandwidth[a][b], latency[a][b]) if a != b else (0.0, math.inf)
            for a in range(count)
            for b in range(count)
        ]
        return cls(types, "matrix", (), tuple(links))


def as_cluster(
    devices: int | Sequence[DeviceType] | Cluster, links: ProfiledLinks | None
) -> Cluster:
    """The cluster, or these devices with the profile's links; without any they are free."""
    if isinstance(devices, Cluster):
        return devices
    types = _types(devices)
    count = sum(each.count for each in types)
    if links is None:
        return Cluster(types, "servers", (count,), ((0.0, math.inf), (0.0, math.inf)))
    if len(links.bandwidth) < count:
        raise ValueError(
            f"devices: {count}, ranks of the profile's links: {len(links.bandwidth)}: links "
            "between more devices are not known; give a Cluster"
        )
    return Cluster.measured(
        [row[:count] for row in links.latency[:count]],
        [row[:count] for row in links.bandwidth[:count]],
        types,
    )


def _types(devices: int | Sequence[DeviceType]) -> tuple[DeviceType, ...]:
    if not isinstance(devices, int):
        are_types = is_list(devices) and all(isinstance(each, DeviceType) for each in devices)
        if not are_types or not devices:
            raise TypeError(
                f"devices: {devices!r} given, it must be a number, DeviceTypes, or for plan() a "
                "Cluster"
            )
        return tuple(devices)
    check_whole_number("devices", devices, at_most=MOST_DEVICES)
    return (DeviceType("device", devices),)


def _check_prices(name: str, given: object) -> None:
    """Raises TypeError or ValueError unless they are prices by rising hours."""
    hours_and_prices = [(0.0, given)] if _is_number(given) else given
    if not is_list(hours_and_prices) or not all(
        is_list(each) and len(each) == 2 and all(map(_is_number, each)) for each in hours_and_prices
    ):
        raise TypeError(f"{name}: {given!r} given, it must be a number or a list of (hour, price)")
    if not hours_and_prices or hours_and_prices[0][0] != 0:
        raise ValueError(f"{name}: {given!r}, the first price must be of hour 0")
    for (before, _), (hour, _) in itertools.pairwise(hours_and_prices):
        if not before < hour < math.inf:
            raise ValueError(f"{name}: hour {hour} after {before}, hours must rise and be finite")
    for hour, price in hours_and_prices:
        check_number(f"{name} at hour {hour}", price, at_least=0, below=math.inf)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list, a tuple or another sequence that is no str."""
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _link(name: str, bandwidth: Amount, latency: Amount) -> Link:
    seconds = parse_seconds(f"{name} latency", latency)
    return seconds, parse_bandwidth(f"{name} bandwidth", bandwidth)
