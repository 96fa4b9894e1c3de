"""Tests of what is measured in seconds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def at_most_three_times(test: Callable[P, R]) -> Callable[P, R]:
    """Runs a test again whose seconds were wrong: a busy machine is slow once, a fault always."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except AssertionError as error:
                warnings.warn(f"{test.__qualname__}, again: {error}", stacklevel=2)
        return test(*args, **kwargs)

    return tried
