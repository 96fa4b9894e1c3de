"""Variables that CUDA and torch read once, when a process first uses a GPU or NCCL.

They are set when the package is imported, unless the user has set them.
"""

from __future__ import annotations

import os

import torch

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is its old name


def set_variables() -> None:
    """Sets what trainings on GPUs need, in a torch that is built for CUDA.

    CUDA gives a process 8 queues for all its streams by default. What stands behind a transfer that
    waits for another process would wait with it, so there are as many as CUDA allows.

    torch's flight recorder takes Python's lock for the stack of every operation of NCCL, and the
    engine's threads then wait for the user's Python code. Its buffer gets no entries.
    """
    if torch.version.cuda is None:
        return
    os.environ.setdefault(_QUEUES, "32")
    if not any(name in os.environ for name in _RECORDS):
        os.environ[_RECORDS[0]] = "0"
