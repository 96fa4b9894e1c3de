"""How many bytes autograd keeps for a backward."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..model.storages import storage_of

_here = threading.local()


class SavedBytes:
    """Counts the bytes that autograd saves in this thread while it is entered.

    Each storage counts once. The count may be divided into parts, such as layers; it must end while
    what was saved is alive, since storages are distinguished by their places in memory.

    Args:
        not_counted: storages (see :func:`storage_of`) that do not count, such as weights.
    """

    def __init__(self, not_counted: Iterable[int]) -> None:
        self._not_counted = frozenset(not_counted)
        self._sizes: dict[int, int] = {}  # by storage
        self._parts: dict[int, list[int]] = {}  # by storage: the parts that save it
        self._part = 0
        self._new = 0  # bytes that the present part is the first to save
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self._sizes.values())

    def end_part(self) -> int:
        """Ends a part and returns the bytes that it was the first to save."""
        new, self._new = self._new, 0
        self._part += 1
        return new

    def saved_by_several(self) -> list[tuple[int, tuple[int, ...]]]:
        """Returns sizes of storages that several parts save, with the numbers of these parts."""
        return [
            (self._sizes[storage], tuple(parts))
            for storage, parts in self._parts.items()
            if len(parts) > 1
        ]

    def count(self, tensor: torch.Tensor) -> None:
        """Counts a tensor as if autograd had saved it."""
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):  # a DTensor, which has no storage of its own
            for name in wrapper.__tensor_flatten__()[0]:
                if isinstance(getattr(wrapper, name), torch.Tensor):
                    self.count(getattr(wrapper, name))
            return
        storage = storage_of(tensor)
        if storage in self._not_counted:
            return
        if storage not in self._sizes:
            self._sizes[storage] = tensor.untyped_storage().nbytes()
            self._new += self._sizes[storage]
        parts = self._parts.setdefault(storage, [])
        if self._part not in parts:
            parts.append(self._part)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor)
        # A result holds its operator, which saves the result: of a graph that is dropped without
        # a backward neither would ever be freed.
        return tensor.detach()

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        _here.counter = self
        return self

    def __exit__(self, *exception: object) -> None:
        _here.counter = None
        self._hooks.__exit__(*exception)


def count_as_saved(tensor: torch.Tensor) -> None:
    """Counts a tensor that something else than autograd keeps for the backward."""
    counter: SavedBytes | None = getattr(_here, "counter", None)
    if counter is not None:
        counter.count(tensor)
