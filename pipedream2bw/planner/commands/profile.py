"""``pipedream2bw profile``: measures a model's layers and writes what a planner reads."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...commands.output import check_written
from ..profiling.peaks import KNOWN_DEVICES
from ..profiling.profile import Profile
from ..profiling.profiler import check_arguments, profile
from .options import Options

_NEEDED = ("model", "loss_fn", "example_args", "target")
_ALLOWED = (*_NEEDED, "example_kwargs", "replicated")
MODEL_HELP = "a function that returns a dict: model, loss_fn, example_args, target"
PROFILING = Options(
    profile,
    {
        "rows": "rows of the microbatches",
        "dry": "compute from a device's figures, without measuring: " + ", ".join(KNOWN_DEVICES),
    },
)
"""How any command profiles a model."""

_MEASURING = Options(
    profile,
    {
        "parallel": "threads that measure at the same time: one for each stage on this machine",
        "seconds": "how long each number of rows is measured",
    },
)


def add_profile_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "profile",
        help="measure a model's layers for the planner",
        description="Measures the times and bytes of a model's layers, and writes them as JSON. "
        "Under torchrun all ranks measure at the same time, also the links between them; rank 0 "
        "writes.",
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help=MODEL_HELP)
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="OUT", help="the profile, JSON"
    )
    PROFILING.add_to(parser)
    _MEASURING.add_to(parser)


def build_model(name: str) -> dict[str, Any]:
    """Calls a function ``module:function``, and returns its model with an example call.

    The function returns a dict of arguments of :func:`pipedream2bw.profile`: model, loss_fn,
    example_args and target, and if needed example_kwargs and replicated. The module may be in the
    current folder.

    Raises:
        ValueError, TypeError, ImportError: there is no such function, or it returns something else.
        RuntimeError: from what the function raised.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"--model: {name!r}, it must be MODULE:FUNCTION")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):  # what the command prints may be JSON
        function = getattr(importlib.import_module(module_name), function_name, None)
        if not callable(function):
            raise ValueError(f"--model: {name!r}: {module_name} has no function {function_name!r}")
        try:
            built = function()
        except Exception as error:
            raise RuntimeError(f"--model: {name!r} raised {type(error).__name__}") from error
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


def _run(given: argparse.Namespace) -> None:
    started = time.monotonic()
    check_written("-o", given.output)
    options = PROFILING.given(given) | _MEASURING.given(given)
    check_arguments(**options)
    found = profile(**build_model(given.model), **options)
    if int(os.environ.get("RANK", "0")) == 0:
        found.save(given.output)
        print(_summary(found, time.monotonic() - started))


def _summary(found: Profile, seconds: float) -> str:
    starts = [0, *(i + 1 for i, layer in enumerate(found.layers) if layer.can_cut_after)]
    timed = sum(found.layers[start].repeats is None for start in starts)
    title = (
        f"{found.model_name} on {found.device.name}, profiled in {seconds:.1f} s: "
        f"{len(found.layers)} layers in {len(starts)} groups, {timed} of them different"
    )
    return found.table(title)
