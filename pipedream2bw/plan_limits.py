"""Which memory a plan may use of each device, and an error's numbers as the caller gave them."""

from __future__ import annotations

import math
import re

from .calibration import Calibration
from .cluster import Cluster
from .units import parse_bytes

_GIB = 2.0**30
_FORBIDS = re.compile(r"(?P<before>memory forbids .*, which needs )(?P<needs>\S+)(?= GiB)")
_DOES_NOT_FIT = re.compile(
    r"memory: (?P<given>\S+) GiB: (?P<what>the model fits on no plan.*?)"
    r"(?P<lack>, which lacks \S+ GiB: memory = )?(?(lack)(?P<enough>\S+)(?P<rest> GiB would do))$"
)


def memory_of_types(
    cluster: Cluster, memory: float, calibration: Calibration | None
) -> list[float]:
    """Bytes that a plan may use of a device of each type.

    Raises:
        ValueError: the calibration's offset leaves nothing of one.
    """
    left = []
    for each in cluster.types:
        name, own = "memory", memory
        if each.memory is not None:
            name = f"device type {each.name}: memory"
            own = parse_bytes(name, each.memory)
        left.append(own if calibration is None else calibration.memory_left(own, name))
    return left


def explain_bound(sentence: str, calibration: Calibration | None) -> str:
    """A plan's ``bound_by``, where it tells what a faster plan needs, likewise."""
    if calibration is None or calibration.offset == 0:
        return sentence
    offset = calibration.offset / _GIB
    return _FORBIDS.sub(
        lambda found: f"{found['before']}{float(found['needs']) + offset:.5g}", sentence
    )


def explain_limits(message: str, cluster: Cluster, calibration: Calibration | None) -> str:
    """The planner's "fits on no plan", told in what the caller gave.

    The planner knows neither the calibration's offset, which is added here, nor which types of
    devices have ``plan(memory=)``. Any other message stays as it is.
    """
    found = _DOES_NOT_FIT.match(message)
    if found is None:
        return message
    told = message
    if calibration is not None and calibration.offset > 0:
        offset = calibration.offset / _GIB
        given = float(found["given"]) + offset
        told = f"memory: {given:.6g} GiB: {found['what']}"
        if found["enough"] is not None:
            enough = math.ceil((float(found["enough"]) + offset) * 1000) / 1000
            told += f", which lacks {enough - given:.6g} GiB: memory = {enough:.3f}{found['rest']}"
        told += f" (with the calibration's offset, {offset:.6g} GiB of each device)"
    own = [
        f"{each.name!r} ({parse_bytes('memory', each.memory) / _GIB:.6g} GiB)"
        for each in cluster.types
        if each.memory is not None
    ]
    if own:
        told += f"; types with a memory of their own, DeviceType(memory=): {', '.join(own)}"
    return told
