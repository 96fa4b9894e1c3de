"""Which streams stand behind one that waits, because they share a hardware queue with it.

CUDA promises no progress of one stream while another waits. Two transfers that have to run at the
same time, on two streams of a process, hang where these share a queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from .building import ROOT
from .device import Device
from .jitter import HIGHEST, LOWEST, STREAMS_OF_A_POOL
from .section import NO_TIME, Rows

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
SETTINGS = (None, "8", "32")
PRIORITIES = {"low": LOWEST, "high": HIGHEST}
BLOCKED = (0, 1, 7)
"""The streams of each priority that wait in turn, by the order in which they were made."""
PATIENCE = 0.2  # seconds in which a tiny kernel of a stream that waits for nothing is done
RELEASED_AFTER = 3.0  # seconds, whatever else happens
SECONDS, LAST = 18.0, 1.5
"""For the processes, and before the section's end."""
_EQUAL_OR_GREATER = 0  # CU_STREAM_WAIT_VALUE_GEQ


def run(device: Device, rows: Rows) -> None:
    """A process for each setting, all at once: a stream that waits takes nothing of the device."""
    if not device.is_gpu:
        rows.absent("queues", "this device has none")
        return
    asked = {setting: _start(setting) for setting in SETTINGS}
    seconds = min(SECONDS, rows.seconds_left - LAST)
    deadline = time.monotonic() + seconds
    for setting, process in asked.items():
        name = f"{VARIABLE} {'unset' if setting is None else f'= {setting}'}"
        with rows.guarded(name), _ended(process):
            try:
                out, error = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                if seconds == SECONDS:
                    raise
                rows.absent(name, NO_TIME)
                continue
            if process.returncode != 0:
                rows.check(name, False, "\n".join(error.splitlines()[-1:] + error.splitlines()))
                continue
            found: list[list[Any]] = json.loads(out.splitlines()[-1])
            for priority in PRIORITIES:
                behind = [Behind(*each) for each in found if each[0] == priority]
                rows.figure(
                    f"{name}: streams behind one of {priority} priority that waits",
                    max(each.low + each.high for each in behind),
                    detail="; ".join(map(str, behind)),
                )


@dataclasses.dataclass(frozen=True)
class Behind:
    """How many of each priority were not done while one of ``priority`` waited."""

    priority: str
    number: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"number {self.number}: {self.low} of low, {self.high} of high priority"


def _start(setting: str | None) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=variables | ({} if setting is None else {VARIABLE: setting}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


class Word:
    """Four bytes of the host's that a stream can wait for; the driver's own functions do that."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1024, dtype=torch.int32).pin_memory()
        self._driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        self._call(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(address),
            ctypes.c_void_p(self._memory.data_ptr()),
            ctypes.c_uint(0),
        )
        self._on_device = address
        self._on_host = ctypes.c_uint32.from_address(self._memory.data_ptr())

    def block(self, stream: torch.cuda.Stream) -> None:
        """What the stream is given later waits until :meth:`release`."""
        self._on_host.value = 0
        self._call(
            "cuStreamWaitValue32_v2",
            ctypes.c_void_p(stream.cuda_stream),
            self._on_device,
            ctypes.c_uint32(1),
            ctypes.c_uint(_EQUAL_OR_GREATER),
        )

    def release(self) -> None:
        self._on_host.value = 1

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: error {result}")


def count_behind(
    word: Word, streams: list[torch.cuda.Stream], values: list[torch.Tensor], blocked: int
) -> list[int]:
    """The streams whose tiny kernel is not done while the one of that number waits."""
    watchdog = threading.Timer(RELEASED_AFTER, word.release)
    watchdog.start()
    try:
        word.block(streams[blocked])
        behind_it = torch.cuda.Event()  # as a transfer's end, which others could wait for
        behind_it.record(streams[blocked])
        done = {}
        for number, stream in enumerate(streams):
            if number != blocked:
                with torch.cuda.stream(stream):
                    values[number].add_(1)
                done[number] = torch.cuda.Event()
                done[number].record(stream)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not all(event.query() for event in done.values()):
            time.sleep(1e-3)
        return [number for number, event in done.items() if not event.query()]
    finally:
        word.release()
        watchdog.cancel()
        torch.cuda.synchronize()


def main() -> None:
    """Prints, for each stream that was kept waiting, how many stood behind it."""
    streams = [
        torch.cuda.Stream(priority=priority)
        for priority in PRIORITIES.values()
        for _ in range(STREAMS_OF_A_POOL)
    ]
    values = [torch.zeros(8, device="cuda") for _ in streams]
    for stream, value in zip(streams, values, strict=True):  # what a first use loads is there
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            value.add_(1)
    torch.cuda.synchronize()
    word = Word()
    found = []
    for place, priority in enumerate(PRIORITIES):
        for number in BLOCKED:
            behind = count_behind(word, streams, values, place * STREAMS_OF_A_POOL + number)
            low = sum(each < STREAMS_OF_A_POOL for each in behind)
            found.append([priority, number, low, len(behind) - low])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
