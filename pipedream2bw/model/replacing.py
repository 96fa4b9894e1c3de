"""Putting other tensors in the place of those that modules hold."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

NewOf = Callable[[torch.Tensor], torch.Tensor]


def replace_tensors(modules: Iterable[nn.Module], new_of: NewOf) -> None:
    """Puts ``new_of(tensor)`` where the modules hold ``tensor``.

    That is among their parameters and buffers, and in plain attributes, lists, tuples and
    dictionaries, at most two deep: what a structural clone maps, too.
    """
    for module in modules:
        for name, value in list(vars(module).items()):
            if name != "_modules" and "_hooks" not in name:
                vars(module)[name] = _replaced(value, new_of, depth=2)


def _replaced(value: Any, new_of: NewOf, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return new_of(value)
    if isinstance(value, weakref.ref):
        target = value()
        if isinstance(target, torch.Tensor) and new_of(target) is not target:
            return weakref.ref(new_of(target))
        return value
    if depth == 0:
        return value
    if type(value) is tuple:
        items = [_replaced(item, new_of, depth - 1) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return tuple(items) if changed else value
    # In place, since others may hold the same list or dictionary.
    if isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = _replaced(item, new_of, depth - 1)
    elif type(value) is list:
        value[:] = [_replaced(item, new_of, depth - 1) for item in value]
    return value


def return_freed_memory() -> None:
    """Does nothing where the C library is not glibc.

    glibc keeps freed blocks of up to 32 MiB for itself. When the pipeline has taken over a model of
    many smaller parameters, that would be the model's whole size once more.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
