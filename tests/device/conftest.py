"""Tests on the checked device: a pytest process of their own, as a process has one accelerator."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterator

import pytest
import torch

from tests.device import checked

SECONDS = 150


@pytest.fixture(autouse=True)
def _every_race_is_expected() -> Iterator[None]:
    """Fails a test that leaves an error that it did not clear; stacks are printed when it hangs."""
    checked.clear_errors()
    gc.collect()  # what an earlier test's traceback held
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    checked.set_drains(at_first_use=True, probability=0.0, seed=0)
    checked.set_timeout(20.0)
    checked.set_eager_sends(False)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    with checked.expect_no_errors():
        yield
    faulthandler.cancel_dump_traceback_later()
