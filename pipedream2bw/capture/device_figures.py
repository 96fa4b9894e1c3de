"""A device's peak figures, which turn counts of operations and bytes into seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..checks import check_number


class Work(NamedTuple):
    """What one operator does."""

    flops: int
    dtype: torch.dtype  # of its first tensor, if it has flops
    moved: int  # bytes read and written


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What a device can do at most, and how much of that kernels reach.

    An operator takes the longer of its arithmetic and its memory traffic (the roofline model,
    Williams, Waterman and Patterson, CACM 52(4), 2009), and ``seconds_per_operator``.

    Attributes:
        name, type: as in a profile; the type is "cuda" or "cpu".
        flops_per_second: peak by dtype; a dtype that is missing has that of float32.
        bytes_per_second: peak bandwidth of the memory.
        memory_bytes: size of the memory.
        efficiency, memory_efficiency: the part of each peak that kernels reach.
        seconds_per_operator: what every operator takes in addition to its work.
        overlapped: arithmetic and traffic run at the same time; else their times are added.
        free_ones_too: operators that compute nothing take ``seconds_per_operator``, too, and the
            time of their tensors' traffic unless they are views.
        host_bytes_per_second: peak bandwidth of the host's memory, this device's share of it.
        copy_bytes_per_second: peak of copies between host and device, in each direction. Without
            these two a "cuda" device's profile says nothing about optimizers on the host.

    Raises:
        ValueError: a figure that is not positive and finite; float32 is missing.
    """

    name: str
    type: str
    flops_per_second: Mapping[torch.dtype, float]
    bytes_per_second: float
    memory_bytes: int
    efficiency: float = 0.5
    memory_efficiency: float = 0.8
    seconds_per_operator: float = 5e-6
    overlapped: bool = True
    free_ones_too: bool = False
    host_bytes_per_second: float | None = None
    copy_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if torch.float32 not in self.flops_per_second:
            known = ", ".join(map(str, self.flops_per_second)) or "none"
            raise ValueError(f"flops_per_second: torch.float32 is missing, given: {known}")
        for dtype, rate in self.flops_per_second.items():
            check_number(f"flops_per_second[{dtype}]", rate, below=math.inf)
        for name in ("bytes_per_second", "memory_bytes", "efficiency", "memory_efficiency"):
            check_number(name, getattr(self, name), below=math.inf)
        for name in ("efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}: {getattr(self, name)}, it must be at most 1")
        for name in ("host_bytes_per_second", "copy_bytes_per_second"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), below=math.inf)
        seconds = self.seconds_per_operator
        check_number("seconds_per_operator", seconds, at_least=0, below=math.inf)

    def seconds(
        self,
        work: Sequence[Work],
        *,
        arithmetic: int = 1,
        traffic: int = 1,
        more_bytes: int = 0,
        operators: int = 1,
    ) -> float:
        """Returns the time of operators whose flops, bytes and number are multiples of ``work``.

        ``more_bytes`` are moved in addition.
        """
        bandwidth = self.bytes_per_second * self.memory_efficiency
        if self.overlapped:
            busy = sum(
                max(arithmetic * flops / self._rate(dtype), traffic * moved / bandwidth)
                for flops, dtype, moved in work
            )
        else:
            flops_at: dict[float, int] = {}
            for flops, dtype, _ in work:
                rate = self._rate(dtype)
                flops_at[rate] = flops_at.get(rate, 0) + flops
            computing = sum(flops / rate for rate, flops in flops_at.items())
            moving = sum(moved for _, _, moved in work) / bandwidth
            busy = computing * arithmetic + traffic * moving
        return busy + more_bytes / bandwidth + operators * (len(work) * self.seconds_per_operator)

    def _rate(self, dtype: torch.dtype) -> float:
        peaks = self.flops_per_second
        return peaks.get(dtype, peaks[torch.float32]) * self.efficiency


NOMINAL = DeviceFigures(
    name="one core of a nominal machine",
    type="cpu",
    flops_per_second={torch.float32: 50e9},
    bytes_per_second=10e9,
    memory_bytes=2**33,
    efficiency=1.0,
    memory_efficiency=1.0,
    seconds_per_operator=2e-6,
    overlapped=False,
    free_ones_too=True,
)
"""Balances the stages where nothing is measured; only the ratios of its seconds matter."""
