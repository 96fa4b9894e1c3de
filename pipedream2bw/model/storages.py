"""The memory behind tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import nn


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number for the storage of a tensor, also of a fake one, unique while it lives."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of the storage that is the tensor's, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def return_freed_memory() -> None:
    """Has the C library return freed memory to the system; only glibc can.

    glibc keeps freed blocks of up to 32 MiB for itself. When the pipeline has taken over a model of
    many smaller parameters, that would be the model's whole size once more.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class OtherStages:
    """The parameters of stages that other processes run: their memory, if any, is given back.

    Shapes stay, as the model may be captured again in its other mode.
    """

    def __init__(self, root: nn.Module, kept: Sequence[torch.Tensor]) -> None:
        kept_storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        for parameter in root.parameters():
            if parameter.is_meta:
                continue
            storage = parameter.untyped_storage()
            alone = storage.nbytes() == parameter.numel() * parameter.element_size()
            if alone and storage.nbytes() and storage.data_ptr() not in kept_storages:
                self._released.append((storage, storage.nbytes()))
        self._resize(whole=False)

    def _resize(self, *, whole: bool) -> None:
        for storage, nbytes in self._released:
            storage.resize_(nbytes if whole else 0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the parameters memory, of no defined content, for the time of a capture."""
        self._resize(whole=True)
        try:
            yield
        finally:
            self._resize(whole=False)
