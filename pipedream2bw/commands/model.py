"""Builds the user's model, which the command line names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

_NEEDED = ("model", "loss_fn", "example_args", "target")


_ALLOWED = (*_NEEDED, "example_kwargs", "replicated")


def build_model(name: str) -> dict[str, Any]:
    """Calls a function ``module:function``, and returns its model with an example call.

    The function returns a dict of arguments of :func:`pipedream2bw.profile`: model, loss_fn,
    example_args and target, and if needed example_kwargs and replicated. The module may be in the
    current folder.

    Raises:
        ValueError, TypeError, ImportError: there is no such function, or it returns something else.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"--model: {name!r}, it must be MODULE:FUNCTION")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"--model: {name!r}: {module_name} has no function {function_name!r}")
    built = function()
    if not isinstance(built, Mapping):
        raise TypeError(
            f"--model: {name!r} returned {type(built).__name__}, it must return a dict with "
            f"{', '.join(_NEEDED)}"
        )
    for key in _NEEDED:
        if key not in built:
            raise ValueError(
                f"--model: {name!r} returned no {key!r}, given: {', '.join(map(str, built))}"
            )
    for key in built:
        if key not in _ALLOWED:
            raise ValueError(f"--model: {name!r} returned {key!r}, known: {', '.join(_ALLOWED)}")
    return dict(built)
