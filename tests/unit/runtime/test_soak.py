"""A short form of ``python -m tests.soak``: a process that trains holds no more and more."""

from __future__ import annotations

import sys

import pytest

from tests import soak


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_a_process_that_trains_saves_and_builds_pipelines_again_does_not_grow() -> None:
    ((growing, printed),) = soak.run(batches=300, pipelines=3, timeout=60.0)
    assert not growing, f"{growing}\n{printed}"
