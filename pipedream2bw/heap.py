"""Freed memory that the C library keeps, given back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Does nothing where the C library is not glibc.

    glibc keeps freed blocks of up to 32 MiB for itself. When the pipeline has taken over a model of
    many smaller parameters, that would be the model's whole size once more.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
