"""A watch for processes whose messages a device waits for, where no thread waits for them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from .. import _C
from ..errors import PeerLost
from .device_rings import DeviceRing

_REST_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class PeerWatch:
    """Raises the fault when a process has ended and a device here does not come to rest after it.

    A device that waits for memory which a dead process would have written waits for ever, and with
    it the threads that wait for the device. What the process sent before its end is received.
    """

    def __init__(self, fault: _C.Fault) -> None:
        self._fault = fault
        self._rings: dict[int, DeviceRing] = {}  # by descriptor of the process
        self._poll = select.poll()
        self._wake, self._woken = os.pipe()
        self._poll.register(self._wake, select.POLLIN | select.POLLHUP)
        self._thread = threading.Thread(target=self._watch, name="pd2 watches peers", daemon=True)

    def add(self, ring: DeviceRing) -> None:
        """Watches the other end's process too, from start() on."""
        descriptor = os.pidfd_open(ring.process)
        self._rings[descriptor] = ring
        self._poll.register(descriptor, select.POLLIN)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the watch and drops the channels' ends."""
        os.close(self._woken)
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (self._wake, *self._rings):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._rings.clear()

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    return
                self._poll.unregister(descriptor)
                rank = self._rings[descriptor].rank
                if not _comes_to_rest(self._rings[descriptor].end):
                    text = "its process has ended, and this one's device waits for it"
                    self._fault.raise_(PeerLost(f"rank {rank}: {text}", rank=rank, cause=text))


def _comes_to_rest(end: _C.DeviceRingSender | _C.DeviceRingReceiver) -> bool:
    deadline = time.monotonic() + _REST_SECONDS
    while not end.is_idle:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
