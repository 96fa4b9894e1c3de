"""What every Python test of the project starts from."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

# One thread a process, before torch is imported: tests start processes and threads of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

THREADS = torch.get_num_threads()

# A shell's background jobs ignore Ctrl-C, and so would the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_stays() -> None:
    # The garbage collector need not look there: for all of torch it would take 0.2 s each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _threads_stay_as_they_are() -> Iterator[None]:
    # The oracle's last bits depend on them: a test that left others behind would fail later ones.
    yield
    threads = torch.get_num_threads()
    if threads != THREADS:
        torch.set_num_threads(THREADS)
    assert threads == THREADS


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test() -> None:
    # Without a GPU, torch notes for later where each call came from, which takes it 3 ms.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
