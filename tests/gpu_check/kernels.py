"""Optimizer passes on the device against those on the CPU, bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from pipedream2bw import _C

from .device import Device
from .section import Pace, Rows
from .training import has_pass

ALIGNED = 512  # bytes: where a parameter of a device begins
POISON = -7.0
FACTORS = (1.0, -0.5, 3.0)  # of the gradient at each step: Adam forgets one that stays the same
SGD: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd, decay": {"weight_decay": 0.1},
    "sgd, momentum": {"momentum": 0.9, "dampening": 0.1},
    "sgd, nesterov, maximize": {"momentum": 0.9, "nesterov": True, "maximize": True},
}
ADAM: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, decay": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adam, amsgrad": {"amsgrad": True},
}
STORED = ("float32", "float64", "bf16 master", "fp16 master", "split master")
EVERY_SIZE = [*range(1, 4098), 2**20 + 3]
SIZES = [*range(1, 70), *(2**k + d for k in range(7, 15) for d in (-1, 0, 1)), 2**20 + 3]
OF_EVERY_SIZE = {"float32": ("sgd, momentum", "adamw"), "bf16 master": ("adam",)}
"""Kinds by what weights are stored as. Others share their loops; the CPU takes a second each."""
THREADS = 8
FAR_END_BYTES = 30 * 10**9


@dataclasses.dataclass
class Arrays:
    """What a step reads and writes: flat, on one device."""

    w: torch.Tensor
    gradient: torch.Tensor
    w_out: torch.Tensor
    master: torch.Tensor | None

    def on(self, device: torch.device, offset: int) -> Arrays:
        """A copy whose arrays begin ``offset`` elements into their memory."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
            return memory[offset:].copy_(tensor)

        master = None if self.master is None else moved(self.master)
        return Arrays(moved(self.w), moved(self.gradient), moved(self.w_out), master)


def run(device: Device, rows: Rows) -> None:
    if not has_pass(device):
        rows.absent("passes", "the engine has none for this device")
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, len(os.sched_getaffinity(0))))  # the CPU takes longest
    try:
        compare_all(device, rows)
    finally:
        torch.set_num_threads(threads)


def compare_all(device: Device, rows: Rows) -> None:
    every_size, sizes = (EVERY_SIZE, SIZES) if device.is_gpu else ([*range(1, 40), 4097],) * 2
    pace = Pace(rows)
    for stored in STORED:
        with rows.guarded(f"{stored}: all kinds"):
            wrong: list[str] = []
            done = 0
            for name, options in kinds_of(stored):
                if pace.has_time(f"{stored}: {name}"):
                    chosen = every_size if name in OF_EVERY_SIZE.get(stored, ()) else sizes
                    compare(device, name, options, stored, chosen, 0, wrong)
                    done += 1
            if done:
                rows.check(f"{stored}: all kinds", not wrong, "\n".join(wrong) or f"{done}")
    name = "every misalignment"
    if pace.has_time(name):
        with rows.guarded(name):
            misaligned(device, rows, name)
    name = "2^31 + 5 elements, the end"
    free = torch.cuda.mem_get_info()[0] if device.is_gpu else 0
    if free < FAR_END_BYTES:
        rows.absent(name, f"{FAR_END_BYTES:,} bytes of memory are needed, {free:,} are free")
    elif pace.has_time(name):
        with rows.guarded(name):
            apart = far_end(device)
            rows.check(name, apart == 0, f"{apart} elements differ")


def misaligned(device: Device, rows: Rows, name: str) -> None:
    wrong: list[str] = []
    for stored, offset in itertools.product(STORED, range(1, 16)):
        compare(device, "adam", {}, stored, [1, 5, 33, 1025], offset, wrong)
    rows.check(name, not wrong, "\n".join(wrong))


def small() -> int:
    """Compares one size of every kind with the CPU's; 1 if anything differs."""
    wrong: list[str] = []
    for stored in STORED:
        for name, options in kinds_of(stored):
            compare(Device("cuda", ""), name, options, stored, [5, 1025], 0, wrong)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def kinds_of(stored: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that there are for weights which are stored so."""
    if stored != "split master":
        yield from SGD.items()
    yield from ADAM.items()


def kind_of(name: str) -> str:
    return "sgd" if name in SGD else "adam"


def compare(
    device: Device,
    name: str,
    options: dict[str, Any],
    stored: str,
    sizes: list[int],
    offset: int,
    wrong: list[str],
) -> None:
    """Adds to ``wrong`` what differs after some steps, of which one leaves parameters out."""
    slices, total = packed(sizes, 8 if stored == "float64" else 4)
    groups = [_C.GroupOptions(lr=rate, **options) for rate in (1e-2, 3e-3)]
    inside = torch.zeros(total, dtype=torch.bool)
    for each in slices:
        inside[each.offset : each.offset + each.numel] = True
    arrays = made(stored, inside)
    here = arrays.on(torch.device("cpu"), 0)
    there = arrays.on(device.torch, offset)
    try:
        ours = _C.FusedOptimizer(kind_of(name), slices, there.gradient)
        theirs = _C.FusedOptimizer(kind_of(name), slices, here.gradient)
        for step, factor in enumerate(FACTORS):
            has_gradient = [step != 1 or i % 3 != 0 for i in range(len(slices))]
            for optimizer, on in ((ours, there), (theirs, here)):
                on.gradient.mul_(factor)
                on.w_out.fill_(POISON)
                optimizer.step(
                    w=on.w,
                    gradient=on.gradient,
                    w_out=on.w_out,
                    groups=groups,
                    has_gradient=has_gradient,
                    master=on.master,
                )
                on.w, on.w_out = on.w_out, on.w
    except ValueError as error:
        wrong.append(f"{name}, {stored}, {offset} elements in: {error}")
        return
    for what in ("w", "master"):
        a, b = getattr(there, what), getattr(here, what)
        if b is None:
            continue
        differ = int((~same(a.cpu(), b) & inside).sum())
        if differ:
            wrong.append(f"{name}, {stored}, {offset} elements in: {differ} of {what}")


def packed(sizes: list[int], element: int) -> tuple[list[_C.ParameterSlice], int]:
    """Parameters one after the other, in turn of two groups and of alike neighbours."""
    per_line = ALIGNED // element
    slices, at = [], 0
    for number, size in enumerate(sizes):
        slices.append(_C.ParameterSlice(offset=at, numel=size, group=number // 2 % 2))
        at += -(-size // per_line) * per_line
    return slices, at


def made(stored: str, inside: torch.Tensor) -> Arrays:
    """Random numbers, and every kind of odd one, with zeros in between; the outputs are poison."""
    total = inside.numel()
    generator = torch.Generator().manual_seed(total)
    dtype = torch.float64 if stored == "float64" else torch.float32
    w = torch.randn(total, generator=generator, dtype=dtype)
    gradient = torch.randn(total, generator=generator, dtype=dtype)
    for number, odd in enumerate(
        (0.0, -0.0, 1e-42, -1e-40, torch.inf, -torch.inf, torch.nan, 3e38)
    ):
        gradient[number::97] = odd
        w[number + 11 :: 101] = odd if number < 4 else 1.5 * number
    w *= inside
    gradient[~inside] = 0
    if "master" not in stored:
        return Arrays(w, gradient, torch.full_like(w, POISON), None)
    half = torch.float16 if stored == "fp16 master" else torch.bfloat16
    low = w.to(half)
    out = torch.full_like(low, POISON)
    if stored == "split master":
        remainder = torch.randint(-(2**15), 2**15, (total,), generator=generator)
        return Arrays(low, gradient, out, remainder.to(torch.int16))
    return Arrays(low, gradient, out, w)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the bits are equal, or both are NaN."""
    if not a.is_floating_point():
        return a == b
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())


def far_end(device: Device) -> int:
    """How many of the last elements of a very long array differ from the CPU's."""
    total, kept = 2**31 + 5, 4096
    first = total // 16 * 16 - kept
    w = torch.zeros(total, device=device.torch)
    gradient, out = torch.zeros_like(w), torch.full_like(w, POISON)
    tail = torch.randn(2, total - first, generator=torch.Generator().manual_seed(1))
    w[first:], gradient[first:] = tail[0].to(w.device), tail[1].to(w.device)
    group = [_C.GroupOptions(lr=0.1, weight_decay=0.01)]

    def step(w: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        whole = [_C.ParameterSlice(offset=0, numel=w.numel(), group=0)]
        _C.FusedOptimizer("sgd", whole, g).step(
            w=w, gradient=g, w_out=out, groups=group, has_gradient=[True]
        )
        return out

    want = step(tail[0].clone(), tail[1].clone(), torch.empty(total - first))
    got = step(w, gradient, out)[first:].cpu()
    return int((got.view(torch.int32) != want.view(torch.int32)).sum())


if __name__ == "__main__":
    sys.exit(small())
