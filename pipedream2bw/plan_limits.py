"""Which memory a plan may use of each device."""

from __future__ import annotations

from .calibration import Calibration
from .cluster import Cluster
from .units import parse_bytes

_GIB = 2.0**30


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


def name_own_memories(message: str, cluster: Cluster) -> str:
    """The planner's "fits on no plan" with the types that ``plan(memory=)`` is not about."""
    own = [
        f"{each.name!r} ({parse_bytes('memory', each.memory) / _GIB:.6g} GiB)"
        for each in cluster.types
        if each.memory is not None
    ]
    if not own or "the model fits on no plan" not in message:
        return message
    return f"{message}; types with a memory of their own, DeviceType(memory=): {', '.join(own)}"
