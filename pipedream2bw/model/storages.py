"""The memory behind tensors."""

from __future__ import annotations

import contextlib
import ctypes

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number for the storage of a tensor, also of a fake one, unique while it lives."""
    return int(tensor.untyped_storage()._cdata)


def return_freed_memory() -> None:
    """Has the C library return freed memory to the system; only glibc can.

    glibc keeps freed blocks of up to 32 MiB for itself. When the pipeline has taken over a model of
    many smaller parameters, that would be the model's whole size once more.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
