"""The device that is asked."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

KNOWN = ("cuda", "checked")


class Device(NamedTuple):
    """A device by its type, and whether figures of it mean something."""

    type: str
    name: str
    number: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type, self.number)

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    @property
    def module(self) -> Any:
        """``torch.cuda``, or what torch calls so for another type."""
        return torch.get_device_module(self.type)

    @property
    def has_kernels(self) -> bool:
        """Whether the package was built with what it has for this device: passes, graphs, rings.

        Another device than a GPU brings its own, of which passes are none.
        """
        built = importlib.import_module("pipedream2bw._build_info")
        return not self.is_gpu or bool(built.WITH_CUDA)

    def synchronize(self) -> None:
        self.module.synchronize()

    def new_stream(self) -> Any:
        return self.module.Stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread gives its work to the stream."""
        manager: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return manager

    def sleep(self, seconds: float) -> None:
        """Keeps the current stream busy; elsewhere than on a GPU work is done at once."""
        if self.is_gpu:
            torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]

    def seconds_of(
        self,
        work: Callable[[], object],
        *,
        times: int = 1,
        finish: Callable[[], object] = lambda: None,
    ) -> float:
        """How long the device is at work, which has been done once before.

        Args:
            finish: returns when other threads have given the device all of the work.
        """
        work()
        finish()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        finish()
        self.synchronize()
        return (time.perf_counter() - start) / times


CYCLES_A_SECOND = 1.8e9  # about an H100's; sleeps need not be exact


def open_device(type_: str) -> Device:
    """Raises RuntimeError if there is none."""
    if type_ == "checked":
        importlib.import_module("tests.device.checked")
        return Device(type_, "the checked device")
    if not torch.cuda.is_available():
        raise RuntimeError("DEVICE: cuda, but torch sees no GPU")
    return Device(type_, torch.cuda.get_device_name(0))


def unordered_accesses(device: Device) -> list[str]:
    """What the checked device has found; no other looks for any."""
    if device.type != "checked":
        return []
    errors: list[str] = importlib.import_module("tests.device.checked").errors()
    return errors
