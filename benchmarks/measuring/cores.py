"""Cores that do not halt while stages sleep."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = """
import os
os.nice(19)
os.sched_setaffinity(0, [{core}])
while os.getppid() == {parent}:
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Lets a process of the lowest priority run on each core.

    A core of a virtual machine that has nothing to do is given back, and needs 70 microseconds more
    to wake a sleeping thread: 1% of a step of stages that sleep 10 ms, which no core that trains
    ever pays.
    """
    with contextlib.ExitStack() as processes:
        for core in os.sched_getaffinity(0):
            script = _SPIN.format(core=core, parent=os.getpid())
            process = processes.enter_context(subprocess.Popen([sys.executable, "-c", script]))
            processes.callback(process.kill)
        yield
