"""Optimizer passes against a copy that reads and writes as many bytes."""

from __future__ import annotations

import statistics

import torch

from pipedream2bw import _C

from .device import Device
from .kernels import packed
from .section import Rows
from .training import has_pass

AT_LEAST = 0.9
RUNS, MOST_OVER_ONE_RUN = 200, 1.1
ROUNDS = 7
BYTES = {
    "SGD": ("sgd", 12, {}),
    "SGD, momentum": ("sgd", 20, {"momentum": 0.9}),
    "AdamW": ("adam", 28, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW, bf16 master": ("adam", 30, {}),
    "AdamW, split master": ("adam", 28, {}),
}
"""Kind, bytes read and written for an element, and options."""


def run(device: Device, rows: Rows) -> None:
    if not has_pass(device):
        rows.absent("passes", "the engine has none for this device")
        return
    total = 2**27 if device.is_gpu else 2**13
    for name in BYTES:
        with rows.guarded(name):
            one = seconds(device, name, total, 1)
            moved = BYTES[name][1] * total
            copied = copy_seconds(device, moved)
            rows.figure(f"{name}: bandwidth / a copy's", copied / one, at_least=AT_LEAST)
            rows.figure(f"{name}: TB/s", moved / one / 1e12)
            if name == "AdamW":
                many = seconds(device, name, total, RUNS)
                rows.figure(f"{name}: {RUNS} runs / one", many / one, at_most=MOST_OVER_ONE_RUN)


def seconds(device: Device, name: str, total: int, runs: int) -> float:
    """Of a step over that many runs of parameters with options of their own."""
    kind, _, options = BYTES[name]
    sizes = [total // runs] * runs
    slices, length = packed(sizes, 4)
    groups = [_C.GroupOptions(lr=rate, **options) for rate in (1e-3, 2e-3)]
    slices = [
        _C.ParameterSlice(offset=each.offset, numel=each.numel, group=number % 2)
        for number, each in enumerate(slices)
    ]
    gradient = torch.randn(length, device=device.torch)
    w, master = torch.randn(length, device=device.torch), None
    if "master" in name:
        is_split = "split" in name
        master = torch.zeros(length, dtype=torch.int16, device=device.torch) if is_split else w
        w = w.bfloat16()
    out = torch.empty_like(w)
    optimizer = _C.FusedOptimizer(kind, slices, gradient)

    def step() -> None:
        optimizer.step(
            w=w,
            gradient=gradient,
            w_out=out,
            groups=groups,
            has_gradient=[True] * runs,
            master=master,
        )

    return median(device, step)


def copy_seconds(device: Device, num_bytes: int) -> float:
    source = torch.ones(num_bytes // 8, device=device.torch)
    target = torch.empty_like(source)
    return median(device, lambda: target.copy_(source))


def median(device: Device, work) -> float:  # type: ignore[no-untyped-def]
    return statistics.median(device.seconds_of(work, times=5) for _ in range(ROUNDS))
