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
from ...rules import instance
from ...table import table
from ..profiling.profile import Profile
from .arguments import degrees_to_try
from .cluster import Cluster, DeviceType, is_list
from .planner import plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """What the best plan does on some devices of one type.

    Attributes:
        type, devices: the devices' name and number.
        rows_per_second: 0 if there is no plan.
        price_per_hour: of the devices that the plan uses.
        schedule: of the plan; "" if there is none.
        mesh: its sizes of "dp", "pp" and "tp".
        lacks: why there is no plan; "" if there is one.
    """

    type: str
    devices: int
    rows_per_second: float = 0.0
    price_per_hour: float = 0.0
    schedule: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lacks: str = ""


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
        types: each has rows for up to its ``count``. Their names differ.
        cluster_of: gives devices of one type their links; without it they are the profile's.
        tensor_parallel: of these degrees those that divide the devices are tried. Without any
            these devices do nothing, and their row says so. All must suit the layers.
        options: further ones of :func:`plan`.

    Raises:
        ValueError, TypeError: as :func:`plan`, but for a model that does not fit some devices; or
            there are no types, or two of one name.
    """
    instance("a Profile", Profile).check("profile", profile)
    rows = []
    for each, tried in rows_of(types, tensor_parallel):
        row = Throughput(type=each.name, devices=each.count)
        if tried:
            devices = cluster_of([each])
            row = _planned(row, profile, devices=devices, tensor_parallel=tried, **options)
        else:
            given = f"tensor_parallel: {tensor_parallel}, devices: {each.count}"
            row = dataclasses.replace(row, lacks=f"{given}: no degree divides them")
        rows.append(row)
    return Throughputs(profile_fingerprint=profile.fingerprint, rows=tuple(rows))


def rows_of(
    types: Sequence[DeviceType], tensor_parallel: int | Sequence[int]
) -> list[tuple[DeviceType, list[int]]]:
    """The devices of each row, and the degrees that divide them. Raises TypeError or ValueError."""
    if not is_list(types) or not all(isinstance(each, DeviceType) for each in types):
        raise TypeError(f"types: {types!r} given, it must be a list of DeviceTypes")
    names = [each.name for each in types]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"types: {names}: there must be some, of different names")
    degrees, rows = degrees_to_try(tensor_parallel), []
    for each in types:
        powers = [2**k for k in range(each.count.bit_length())]
        for count in sorted({*powers, each.count}):
            tried = [degree for degree in degrees if count % degree == 0]
            rows.append((dataclasses.replace(each, count=count), tried))
    return rows


def _planned(row: Throughput, profile: Profile, **options: Any) -> Throughput:
    """The row with what the best plan does, or with why there is none."""
    try:
        made = plan(profile, **options)
    except DoesNotFit as error:
        return dataclasses.replace(row, lacks=str(error))
    said = ("rows_per_second", "price_per_hour", "schedule", "mesh")
    return dataclasses.replace(row, **{name: getattr(made, name) for name in said})
