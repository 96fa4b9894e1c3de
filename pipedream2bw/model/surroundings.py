"""The state of the process around a capture: grad and autocast modes, torch's logs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..accelerator import device_types


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Turns gradient recording on and autocast off, as in a stage's thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in device_types():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def torch_reports_silenced() -> Iterator[None]:
    """Keeps torch from logging and printing failures that an error of ours reports later."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    printing = [vars(sys.modules[name]) for name in _PRINTING if name in sys.modules]
    for module in printing:
        module["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        logger.setLevel(level)
        for module in printing:
            module.pop("print", None)


_PRINTING = ("torch.export._trace", "torch.fx.graph_module")
"""Modules that print graphs of what has failed."""


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of a class, a module or an object another value until the end."""
    # Of a class what it holds: a class method stays one.
    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
