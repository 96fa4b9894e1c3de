"""Cases that repeat, at other sizes, what a test's other cases test."""

from __future__ import annotations

from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """For ``parametrize``: ``make test-all`` runs these, ``make test`` does not."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]
