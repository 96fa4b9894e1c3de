"""What devices reach at most: those of data sheets, and this machine, measured shortly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...capture.device_figures import DeviceFigures
from .timing import time_on

_SIDE = 1024  # of the matrices; on a device four times that
_COPIED_BYTES = 2**27  # more than caches hold
_ROUNDS = 5

# From NVIDIA's data sheets, without sparsity, for the memory size in the name. PCIe has 16 lanes of
# generation 3, 4, 5. The host's memory is an eighth of that of DGX-1 (2 x 4 channels DDR4-2400),
# DGX A100 (2 x 8 DDR4-3200), DGX H100 (2 x 8 DDR5-4800).
_BOTH_HALVES = (torch.float16, torch.bfloat16)
KNOWN_DEVICES = {
    key: DeviceFigures(
        name=name,
        type="cuda",
        flops_per_second={torch.float32: flops, **dict.fromkeys(halves, flops_of_halves)},
        bytes_per_second=bandwidth,
        memory_bytes=gib * 2**30,
        host_bytes_per_second=host,
        copy_bytes_per_second=copies,
    )
    for key, name, flops, halves, flops_of_halves, bandwidth, gib, host, copies in (
        ("v100", "V100 SXM2 16GB", 15.7e12, (torch.float16,), 125e12, 900e9, 16, 19.2e9, 16e9),
        ("a100", "A100 SXM4 80GB", 19.5e12, _BOTH_HALVES, 312e12, 2039e9, 80, 51.2e9, 32e9),
        ("h100", "H100 SXM5 80GB", 67e12, _BOTH_HALVES, 989e12, 3350e9, 80, 76.8e9, 64e9),
    )
}


def measured_peaks(device: torch.device, dtype: torch.dtype) -> DeviceFigures:
    """Measures a product of matrices of ``dtype`` and a copy, the best of five rounds of each.

    With the threads that torch uses here now: less than half a second on a core. The peak of
    float32 is that of ``dtype``, since it is the only one that was measured.
    """
    is_host = device.type == "cpu"
    side = _SIDE if is_host else 4 * _SIDE
    with torch.no_grad():
        matrix = torch.rand(side, side, device=device).to(dtype)
        product = torch.empty_like(matrix)
        flops = 2 * side**3 / _best(lambda: torch.mm(matrix, matrix, out=product), device)
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        copied = torch.empty_like(source)
        moved = 2 * _COPIED_BYTES / _best(lambda: copied.copy_(source), device)
    return DeviceFigures(
        name=f"this {device.type} as measured",
        type=device.type,
        flops_per_second={torch.float32: flops, dtype: flops},
        bytes_per_second=moved,
        memory_bytes=1,
        efficiency=1.0,
        memory_efficiency=1.0,
        seconds_per_operator=0.0,
    )


def _best(work: Callable[[], object], device: torch.device) -> float:
    work()  # memory is touched, kernels are chosen
    seconds = []
    for _ in range(_ROUNDS):
        start = time_on(device)
        work()
        seconds.append(time_on(device) - start)
    return min(seconds)
