"""Copies of tensors in memory of the host, which the next copies use again."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import torch

_Name = TypeVar("_Name", bound=Hashable)


class HostMemory:
    """Memory for one copy of a process's state.

    New pages cost the system about as much as copying to them: so they are kept. Tensors that share
    their memory, as a stage's parameters do, are copied at once. Copies of a device's tensors are
    page-locked, so that the device makes them while the host does something else.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.Lock()

    def copy(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> dict[_Name, torch.Tensor]:
        """Copies tensors to the CPU, and waits until that is done; see :meth:`begin_copy`."""
        copies, events = self.begin_copy(tensors, place)
        wait_for(events)
        return copies

    def begin_copy(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> tuple[dict[_Name, torch.Tensor], list[torch.Event]]:
        """Begins to copy tensors to the CPU, in their devices' current streams.

        Any thread may call it, and waits for nothing.

        Args:
            place: names these tensors among others of the same memory. What was copied there is
                overwritten.

        Returns:
            The copies, and events after which they are there.
        """
        storages: dict[int, list[_Name]] = {}
        for name, tensor in tensors.items():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        copies: dict[_Name, torch.Tensor] = {}
        for number, names in enumerate(storages.values()):
            copies |= self._of_one_storage({n: tensors[n] for n in names}, (place, number))
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        events = []
        for device in devices:
            events.append(torch.Event(device))
            events[-1].record(torch.accelerator.current_stream(device))
        return {name: copies[name] for name in tensors}, events

    def nbytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(memory.nbytes for memory in self._kept.values())

    def _of_one_storage(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> dict[_Name, torch.Tensor]:
        storage = next(iter(tensors.values())).untyped_storage()
        wanted = sum(tensor.nbytes for tensor in tensors.values())
        if 2 * wanted < storage.nbytes():  # a small part of something else
            return {
                name: torch.empty_like(
                    tensor, device="cpu", pin_memory=_is_pinned_for(tensor.device)
                ).copy_(tensor.detach(), non_blocking=True)
                for name, tensor in tensors.items()
            }
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        with self._lock:
            memory = self._kept.get(place)
            if memory is None or memory.numel() != source.numel():
                pinned = _is_pinned_for(source.device)
                memory = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=pinned)
                self._kept[place] = memory
        memory.copy_(source, non_blocking=True)
        return {name: _view(memory, tensor) for name, tensor in tensors.items()}


def wait_for(events: Iterable[torch.Event]) -> None:
    """Waits until devices are done with what they were given before the events."""
    for event in events:
        event.synchronize()


def _is_pinned_for(device: torch.device) -> bool:
    return device.type != "cpu"


def _view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = memory.numel() - memory.numel() % like.element_size()
    elements = memory[:whole].view(like.dtype)
    return elements.as_strided(like.shape, like.stride(), like.storage_offset())
