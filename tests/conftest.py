"""What every Python test of the project starts from."""

from __future__ import annotations

import os

import pytest

# One thread a process, before torch is imported: tests start processes and threads of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test() -> None:
    torch.manual_seed(0)
