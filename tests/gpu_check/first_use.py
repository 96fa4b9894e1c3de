"""Whether the first use of a kernel waits until the device is idle, as loading a module may."""

from __future__ import annotations

import threading
import time

import torch

from .device import Device
from .section import Rows

ASLEEP = 1.0  # seconds


def run(device: Device, rows: Rows) -> None:
    """Posted receives of NCCL are kernels that wait: this says what a first use would do then."""
    x = torch.rand(64, device=device.torch)
    outs = [torch.empty_like(x) for _ in range(3)]
    sleeper, other = device.new_stream(), device.new_stream()
    device.sleep(1e-4)
    device.synchronize()
    for operator, out in zip((torch.erfinv, torch.lgamma, torch.digamma), outs, strict=True):
        with device.on(sleeper):
            device.sleep(ASLEEP)
        first, second = (launch(device, operator, other, x, out) for _ in range(2))
        rows.figure(f"{operator.__name__}: first launch, s", first)
        rows.figure(f"{operator.__name__}: second launch, s", second)
        waited = "waits" if first > ASLEEP / 2 else "does not wait"
        if device.is_gpu:
            rows.note(f"{operator.__name__}: a first use", f"{waited} for the device")
        device.synchronize()  # or the next one would find the sleeper nearly over


def launch(device: Device, operator, stream, x, out) -> float:  # type: ignore[no-untyped-def]
    """Seconds of a thread of its own, as the engine's are."""
    taken = []

    def call() -> None:
        with device.on(stream):
            start = time.perf_counter()
            operator(x, out=out)
            taken.append(time.perf_counter() - start)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return taken[0]
