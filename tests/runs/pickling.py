"""Finds whatever is pickled or unpickled in a process, and where."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

Stack = tuple[str, ...]
"""Functions as ``file.py:name``, the innermost first; before them what was done."""

_listeners: list[list[Stack]] = []


def _stack(frame: FrameType | None, *what: str) -> Stack:
    places = []
    while frame is not None:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return (" ".join(what), *places)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    # Python's own, from every unpickler that looks for a class or function, in C too.
    if event == "pickle.find_class" and _listeners:
        stack = _stack(sys._getframe(1), event, *map(str, args))
        for found in _listeners:
            found.append(stack)


sys.addaudithook(_hear)  # which nothing can remove


def _told(function: Callable[..., Any], found: list[Stack]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        found.append(_stack(sys._getframe(1), f"{function.__module__}.{function.__name__}"))
        return function(*args, **options)

    return call


@contextlib.contextmanager
def pickles() -> Iterator[list[Stack]]:
    """Gives a list, to which comes what any thread pickles or unpickles meanwhile.

    That is each class that an unpickler looks for, whoever runs it, and each call of the ``pickle``
    module's functions and of ``torch.save`` and ``torch.load``, also if there is no class in it.
    """
    found: list[Stack] = []
    with contextlib.ExitStack() as patches:
        for module, name in [
            *((pickle, name) for name in ("dump", "dumps", "load", "loads")),
            *((torch, name) for name in ("save", "load")),
        ]:
            told = _told(getattr(module, name), found)
            patches.enter_context(mock.patch.object(module, name, told))
        _listeners.append(found)
        try:
            yield found
        finally:
            _listeners.remove(found)


def is_message(stack: Stack) -> bool:
    """Whether it was of a message that an object collective of ``torch.distributed`` brought."""
    of_messages = {"_object_to_tensor", "_tensor_to_object"}
    return any(f"distributed_c10d.py:{name}" in stack for name in of_messages)
