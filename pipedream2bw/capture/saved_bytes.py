"""How many bytes autograd keeps for a backward."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .operator_counts import storage_of

_here = threading.local()


class SavedBytes:
    """Counts the bytes that autograd saves in this thread: each storage once, some not at all."""

    def __init__(self, not_counted: set[int]) -> None:
        self._not_counted = not_counted
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor)

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        wraps_others = is_traceable_wrapper_subclass(tensor)
        if wraps_others:  # a DTensor, which has no storage of its own
            wrapper: Any = tensor
            for name in wrapper.__tensor_flatten__()[0]:
                if isinstance(getattr(wrapper, name), torch.Tensor):
                    self._see(getattr(wrapper, name))
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._not_counted:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self._storages.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        _here.counter = self
        return self

    def __exit__(self, *exception: object) -> None:
        _here.counter = None
        self._hooks.__exit__(*exception)


def count_as_saved(tensor: torch.Tensor) -> None:
    """Counts what is kept for the backward by others than autograd."""
    counter: SavedBytes | None = getattr(_here, "counter", None)
    if counter is not None:
        counter._see(tensor)


class SavedCounter:
    """Counts what autograd saves, part by part: each storage once, some not at all."""

    def __init__(self, not_counted: Iterable[torch.Tensor]) -> None:
        self._not_counted = set(map(storage_of, not_counted))
        self._parts: dict[int, list[int]] = {}  # by storage, those that save it
        self._sizes: dict[int, int] = {}
        self._part = 0
        self._bytes = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor)

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage in self._not_counted:
            return tensor
        if storage not in self._parts:
            self._parts[storage] = []
            self._sizes[storage] = tensor.untyped_storage().nbytes()
            self._bytes += self._sizes[storage]
        if self._part not in self._parts[storage]:
            self._parts[storage].append(self._part)
        return tensor

    def take(self) -> int:
        """Ends a part: the bytes that it was the first to save."""
        taken, self._bytes = self._bytes, 0
        self._part += 1
        return taken

    def saved_by_several(self) -> list[tuple[int, tuple[int, ...]]]:
        """Bytes of what several parts saved, and these parts' numbers, increasing."""
        return [
            (self._sizes[storage], tuple(parts))
            for storage, parts in self._parts.items()
            if len(parts) > 1
        ]
