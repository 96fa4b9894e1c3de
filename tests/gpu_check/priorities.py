"""How long a copy takes beside large kernels, by the priority of its stream."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .device import Device
from .jitter import HIGHEST, LOWEST, OF_STAGES
from .section import Rows

COPIED_BYTES = 1 << 20
COPIES = 20
PAUSE = 1e-3  # seconds between two copies
WIDTH_ON_A_GPU, WIDTH_ELSEWHERE = 8192, 16
PRODUCTS = 150
"""Each takes 1 to 2 ms of an H100: more than all copies together."""


def run(device: Device, rows: Rows) -> None:
    """The products are on a stream of the priority that stages' own work has."""
    width = WIDTH_ON_A_GPU if device.is_gpu else WIDTH_ELSEWHERE
    factor = torch.randn(width, width, device=device.torch, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    compute = stream_of(device, OF_STAGES)
    for name, priority in (("high", HIGHEST), ("low", LOWEST)):
        copies = stream_of(device, priority)
        alone, _ = latency(device, copies, None)
        beside, is_busy = latency(device, copies, (compute, factor, product))
        what = f"a copy of 1 MiB on a stream of {name} priority, us"
        rows.figure(f"{what}: on an idle device", 1e6 * alone)
        detail = "" if is_busy else "the products were done before the copies"
        rows.figure(f"{what}: beside large products", 1e6 * beside, detail=detail)


def stream_of(device: Device, priority: int) -> Any:
    return device.module.Stream(device.torch, priority=priority)


def latency(
    device: Device, copies: Any, products: tuple[Any, torch.Tensor, torch.Tensor] | None
) -> tuple[float, bool]:
    """Median seconds from a copy's launch to its end, and whether the products outlasted all."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device.torch)
    target = torch.zeros_like(source)
    device.synchronize()
    with device.on(copies):
        target.copy_(source)
    if products is not None:
        compute, factor, product = products
        with device.on(compute):
            torch.mm(factor, factor, out=product)
        device.synchronize()
        with device.on(compute):
            for _ in range(PRODUCTS if device.is_gpu else 1):
                torch.mm(factor, factor, out=product)
            last = device.module.Event()
            last.record(compute)
    device.synchronize() if products is None else time.sleep(PAUSE)
    taken = []
    for _ in range(COPIES):
        start = time.perf_counter()
        with device.on(copies):
            target.copy_(source)
        copies.synchronize()
        taken.append(time.perf_counter() - start)
        time.sleep(PAUSE)
    is_busy = products is not None and not last.query()
    device.synchronize()
    return statistics.median(taken), is_busy
