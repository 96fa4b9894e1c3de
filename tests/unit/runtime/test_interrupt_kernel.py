"""A short form of ``python -m tests.interrupt_kernel``: the stop button of a notebook."""

from __future__ import annotations

import os
import random

import pytest

from tests import interrupt_kernel


def test_an_interrupted_jupyter_kernel_trains_on_as_if_the_discarded_batches_had_not_been() -> None:
    if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
        for package in ("ipykernel", "jupyter_client"):
            pytest.importorskip(package, reason="a kernel needs ipykernel and jupyter_client")
    assert interrupt_kernel.run("2bw", 3, random.Random(0), pause=0.05) == ""
