"""A table of throughputs by type and number of devices, as schedulers of clusters read it.

A heterogeneity-aware scheduler (Gavel, arXiv 2008.09213) divides devices of several types among
jobs by what each job does on each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import DoesNotFit
from ...json_document import Document
from ...table import table
from ..profiling.profile import Profile
from .cluster import Cluster, DeviceType
from .planner import plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """What the best plan does on some devices of one type.

    Attributes:
        type, devices: the devices' name and number.
        rows_per_second: 0 if the model does not fit.
        price_per_hour: of the devices that the plan uses.
        schedule: of the plan; "" if there is none.
        mesh: its sizes of "dp", "pp" and "tp".
        lacks: why there is no plan; "" if there is one.
    """

    type: str
    devices: int
    rows_per_second: float
    price_per_hour: float
    schedule: str
    mesh: Mapping[str, int]
    lacks: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughputs(Document):
    """A table that :func:`throughputs` makes; saved as JSON.

    Attributes:
        profile_fingerprint: of the profiled model.
        rows: by type, and by rising number of devices.
    """

    FORMAT = "pipedream2bw.throughputs"
    VERSION = 1

    profile_fingerprint: str
    rows: tuple[Throughput, ...]

    def row(self, name: str, devices: int) -> Throughput:
        """Finds what so many devices of this type do.

        Raises:
            ValueError: the table has no such row.
        """
        for each in self.rows:
            if (each.type, each.devices) == (name, devices):
                return each
        known = ", ".join(f"{each.type} x {each.devices}" for each in self.rows)
        raise ValueError(f"type: {name!r} x {devices}, rows of the table: {known}: it has none")

    def __str__(self) -> str:
        cells = [
            [
                each.type,
                str(each.devices),
                each.schedule or "-",
                " x ".join(map(str, each.mesh.values())) or "-",
                f"{each.rows_per_second:.4g}",
                f"{each.price_per_hour:.2f}" if each.price_per_hour else "-",
            ]
            for each in self.rows
        ]
        columns = ("type", "devices", "schedule", "dp x pp x tp", "rows/s", "price for an hour")
        lacking = [
            f"{each.type} x {each.devices}: {each.lacks}" for each in self.rows if each.lacks
        ]
        return "\n".join([table("rows a second of the best plan", columns, cells), *lacking])


def throughputs(
    profile: Profile,
    types: Sequence[DeviceType],
    *,
    cluster_of: Callable[[list[DeviceType]], list[DeviceType] | Cluster] = list,
    tensor_parallel: int | Sequence[int] = 1,
    **options: Any,
) -> Throughputs:
    """Plans for 1, 2, 4, ... devices of each type, and for all of them.

    Args:
        types: each has rows for up to its ``count``.
        cluster_of: gives devices of one type their links; without it they are the profile's.
        tensor_parallel: of these degrees those that divide the devices are tried.
        options: further ones of :func:`plan`.

    Raises:
        ValueError, TypeError: as :func:`plan`, but for a model that does not fit some devices.
    """
    degrees = [tensor_parallel] if isinstance(tensor_parallel, int) else list(tensor_parallel)
    rows = []
    for each in types:
        powers = [2**k for k in range(each.count.bit_length())]
        for count in sorted({*powers, each.count}):
            some = dataclasses.replace(each, count=count)
            tried = [degree for degree in degrees if count % degree == 0] or [min(degrees)]
            rows.append(_row(profile, some, cluster_of([some]), tensor_parallel=tried, **options))
    return Throughputs(profile_fingerprint=profile.fingerprint, rows=tuple(rows))


def _row(
    profile: Profile, each: DeviceType, devices: list[DeviceType] | Cluster, **options: Any
) -> Throughput:
    row = Throughput(
        type=each.name,
        devices=each.count,
        rows_per_second=0.0,
        price_per_hour=0.0,
        schedule="",
        mesh={},
        lacks="",
    )
    try:
        made = plan(profile, devices=devices, **options)
    except DoesNotFit as error:
        return dataclasses.replace(row, lacks=str(error))
    said = ("rows_per_second", "price_per_hour", "schedule", "mesh")
    return dataclasses.replace(row, **{name: getattr(made, name) for name in said})
