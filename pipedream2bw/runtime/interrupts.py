"""Ctrl-C while a pipeline's calls change its state."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end: what is inside is done whole.

    Inside nobody may wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread
        return
    came: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def last_uncaught() -> BaseException | None:
    """The last exception that nobody caught, such as an interrupt.

    IPython and Python's own prompt keep it, as programs go on there.
    """
    return getattr(sys, "last_value", None)
