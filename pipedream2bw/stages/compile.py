"""Compiling the stages by torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from .codegen import StageFunction

_MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def compile_options(compile: object, device: torch.device, *, recomputes: bool) -> dict[str, Any]:
    """Returns the options for torch.compile, none if stages are not to be compiled.

    Raises:
        TypeError: ``compile`` is neither a bool nor a dict of torch.compile's options.
        ValueError: stages are recomputed, which compiled ones cannot be, or are to be graphs of
            torch's, or there is no C++ compiler.
    """
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(
            f"compile: {compile!r} given, it must be a bool or a dict of torch.compile's options"
        )
    if isinstance(compile, bool) and not compile:
        return {}
    if recomputes:
        raise ValueError(
            f"compile: {compile!r}, with recompute: a compiled stage draws random numbers in its "
            "own way, which cannot be repeated: choose one of them, or torch.utils.checkpoint "
            "inside the model"
        )
    options = {} if isinstance(compile, bool) else dict(compile)
    if device.type != "cpu":
        _refuse_graphs(options)
    if device.type == "cpu" and options.get("backend", "inductor") == "inductor":
        _check_compiler()
    return {"backend": "inductor", **options}


def _refuse_graphs(options: Mapping[str, Any]) -> None:
    inductors = options.get("options") or {}
    if options.get("mode") in _MODES_WITH_GRAPHS or inductors.get("triton.cudagraphs"):
        raise ValueError(
            f"compile: {dict(options)!r} makes torch's CUDA graphs, of which a run writes over the "
            "one before, while several microbatches are in flight: give graphs=True beside another "
            "mode, for graphs of the pipeline's own"
        )


def compiled(function: StageFunction, options: Mapping[str, Any]) -> StageFunction:
    """Returns the function compiled, at its first call; without options the function itself.

    The functions of a stage's weight slots have one code object and differ in the parameters that
    they are bound to. torch.compile treats parameters as inputs, so all slots share one
    compilation.
    """
    return torch.compile(function, **options) if options else function


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
