"""Compiling the stages by torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from .codegen import StageFunction


def compile_options(compile: bool | Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The options for torch.compile, if any; ValueError if a compiler is missing."""
    if compile is False:
        return {}
    options = {} if compile is True else dict(compile)
    if device.type == "cpu" and options.get("backend", "inductor") == "inductor":
        _check_compiler()
    return {"backend": "inductor", **options}


def compiled(
    function: StageFunction, options: Mapping[str, Any], *, splits_backward: bool
) -> StageFunction:
    """Returns the function compiled, at its first call; without options the function itself.

    Where backwards are split, graphs are kept for the second half, and what they saved is not given
    to the first (torch's donated buffers).

    The functions of a stage's weight slots have one code object and differ in the parameters that
    they are bound to. torch.compile treats parameters as inputs, so all slots share one
    compilation.
    """
    if not options:
        return function
    made: StageFunction = torch.compile(function, **options)
    if not splits_backward:
        return made
    from torch._functorch import config  # which import torch leaves out

    def without_donated_buffers(*args: Any) -> Any:
        config.donated_buffer = False  # each thread's own; the process's in older releases
        return made(*args)

    return without_donated_buffers


def _check_compiler() -> None:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:  # these private names have moved: the first forward fails instead
        return
    reason = None
    with contextlib.suppress(Exception):
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            reason = str(error).splitlines()[0]
    if reason is not None:
        raise ValueError(f"compile: True, but there is no C++ compiler: {reason}")
