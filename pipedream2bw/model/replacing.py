"""What modules hold in their attributes, found and replaced."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes in which nn.Module itself keeps parameters, buffers, modules and hooks."""

Replace = Callable[[Any], Any]
"""Returns what to put in the place of an item, or the item."""


def replaced(value: Any, replace: Replace, *, in_place: bool = False, depth: int = 2) -> Any:
    """Returns ``value`` with ``replace(item)`` where it holds ``item``.

    Looks into lists, tuples and dictionaries, at most ``depth`` of them deep. A weak reference to a
    tensor counts as the tensor.

    Args:
        in_place: lists and dictionaries are changed, since others may hold them too; else copied.
    """
    if isinstance(value, weakref.ref):
        target = value()
        new = replace(target) if isinstance(target, torch.Tensor) else target
        return value if new is target else weakref.ref(new)
    if depth == 0 or not (type(value) in (list, tuple) or isinstance(value, dict)):
        return replace(value)
    old = list(value.values()) if isinstance(value, dict) else value
    items = [replaced(item, replace, in_place=in_place, depth=depth - 1) for item in old]
    if all(new is item for new, item in zip(items, old, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    result = value if in_place else copy.copy(value)
    if isinstance(result, dict):
        result.update(zip(value, items, strict=True))
    else:
        result[:] = items
    return result


def replace_tensors(
    modules: Iterable[nn.Module], new_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Puts ``new_of(tensor)`` where the modules hold ``tensor``.

    They hold tensors as parameters and buffers, and in plain attributes as deep as
    :func:`replaced` looks.
    """

    def replace(item: Any) -> Any:
        return new_of(item) if isinstance(item, torch.Tensor) else item

    for module in modules:
        for name, value in attributes_of(module):
            vars(module)[name] = replaced(value, replace, in_place=True)


def items_in(value: Any) -> list[Any]:
    """Lists what :func:`replaced` would ask about: the value, or what it holds."""
    found: list[Any] = []

    def see(item: Any) -> Any:
        found.append(item)
        return item

    replaced(value, see)
    return found


def tensors_in(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Lists the tensors that a module holds, each after the name of the attribute.

    These are the tensors that :func:`replace_tensors` replaces.
    """
    return [
        (name, item)
        for name, value in attributes_of(module)
        for item in items_in(value)
        if isinstance(item, torch.Tensor)
    ]


def attributes_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Lists what a module holds by itself, but for its hooks: names of attributes, and values."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name != "_modules" and "_hooks" not in name
    ]
