"""Lists of modules, which are called one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..model.materialize import home_of


class ModuleChain(nn.ModuleList):
    """A list of modules that are called one after another.

    The first gets the arguments of the call. A tuple is passed on as positional arguments, anything
    else as one argument.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the first module with the arguments and each other one with the result so far."""
        first, *rest = self
        value = first(*args, **kwargs)
        for module in rest:
            value = call_chained(module, value)
        return value


def call_chained(module: nn.Module, value: Any) -> Any:
    """Calls a module of a list with what the one before it returned."""
    return module(*value) if type(value) is tuple else module(value)


def as_root(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Returns the module to capture and clone: the model, or one module around a list of modules.

    Raises:
        TypeError: neither a module nor a list of modules.
        ValueError: an empty list.
    """
    is_list = isinstance(model, nn.ModuleList) and not isinstance(model, ModuleChain)
    if isinstance(model, nn.Module) and not is_list:
        return model
    modules = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else None
    if modules is None or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(
            f"model: {type(model).__name__} given; it must be an nn.Module or a list of nn.Modules"
        )
    if not modules:
        raise ValueError("model: a list of 0 modules given; a pipeline needs at least 1")
    return ModuleChain(modules)


def device_type_of(model: Any, args: Any, kwargs: Any) -> str:
    """Returns the type of the model's device; "cpu" if the arguments are wrong.

    Processes join by it before they check their arguments together.
    """
    try:
        root = as_root(model)
        return home_of(root, (args, kwargs)).type
    except (TypeError, ValueError):
        return "cpu"
