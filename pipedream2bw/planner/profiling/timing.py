"""The seconds that work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ...accelerator import module_of


def time_on(device: torch.device) -> float:
    """Reads the clock once the device has done all its work."""
    if device.type != "cpu":
        module_of(device.type).synchronize(device)
    return time.perf_counter()


def median_seconds(
    act: Callable[[], object], device: torch.device, *, times: int, warmup: int
) -> float:
    """The median over some calls, after the ones that make buffers and connections."""
    taken = []
    for _ in range(warmup + times):
        start = time_on(device)
        act()
        taken.append(time_on(device) - start)
    return statistics.median(taken[warmup:])
