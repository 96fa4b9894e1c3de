"""Signals by which a scheduler says that a job has to make room."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterable
from types import FrameType


class Preempted(SystemExit):  # ends the program, and is no error
    """The program ends because of a signal.

    The run was saved at the batch that it had reached. If that failed, or the file system hung, a
    warning has said so, and the newest checkpoint is an older one.

    Its code is 128 and the signal's number, on all ranks; if they got different signals, the
    greatest number.
    """


class Signals:
    """Notices signals, once told to; these then do nothing else.

    Args:
        names: such as ``"SIGTERM"``.

    Attributes:
        received: the number of the first one that came, or 0.

    Raises:
        ValueError: there is no such signal, or nobody can notice it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.received = 0
        self._process = os.getpid()
        self._before: dict[signal.Signals, object] = {}
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in _KNOWN:
                raise ValueError(f"preempt: {name!r}, it must be one of {', '.join(_KNOWN)}")
        self._numbers = [signal.Signals[name] for name in names]

    def notice(self) -> None:
        """Begins to."""
        if self._numbers and threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "preempt: a Checkpointer that is not made in the main thread notices no signals",
                stacklevel=3,
            )
            return
        for number in dict.fromkeys(self._numbers):
            self._before[number] = signal.signal(number, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, as a DataLoader's workers are: it ends
            self.restore()
            signal.raise_signal(number)
        self.received = self.received or number

    def restore(self) -> int:
        """Signals do again what they did before; gives the number of the one that came, or 0."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._notice:
                    signal.signal(number, before or signal.SIG_DFL)  # type: ignore[arg-type]
        self._before.clear()
        received, self.received = self.received, 0
        return received


_KNOWN = [name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP")]


def ignore_in_worker(worker: int = 0) -> None:
    """Gives ``DataLoader(worker_init_fn=)``: its processes do not end before the run is saved."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
