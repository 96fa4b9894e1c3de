"""Structural clones: the same modules over other parameters, without copying data.

One clone exists per weight version. Its modules are distinct objects whose Parameters are views of
that version's buffer; buffers and hooks are the very objects of the original, so running statistics
advance in one place and a hook registered later is seen by every clone.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .refusals import refuse_uncloneable_module

# Dictionaries that the clone shares with the original instead of copying.
_SHARED_DICTS = ("_buffers", "_non_persistent_buffers_set")


def structural_clone(
    root: nn.Module, parameters: Mapping[nn.Parameter, nn.Parameter], *, own_buffers: bool = False
) -> nn.Module:
    """Clones the module tree of ``root`` and puts ``parameters[p]`` where it holds parameter ``p``.

    Parameters that ``parameters`` lacks stay the original's. Buffers (without ``own_buffers``,
    which gives the clone copies) and hooks are shared, plain
    attributes are shared except where they hold (directly, or in lists, tuples and dicts, at most
    two deep) parameters, modules or methods of the tree: those are mapped too. A module
    reached twice is cloned once.

    Raises:
        TypeError: a module keeps its parameters where Python cannot replace them (TorchScript, a
            module wrapped by ``torch.compile``).
    """
    return _Cloner(parameters, own_buffers).module(root)


def copy_training_flags(source: nn.Module, clone: nn.Module) -> None:
    """Gives every module of ``clone`` the ``training`` flag of its counterpart in ``source``.

    ``train()`` on the root would overwrite submodules that the user froze in eval mode.
    """
    flags = {name: module.training for name, module in source.named_modules()}
    for name, module in clone.named_modules():
        module.training = flags[name]


class _Cloner:
    def __init__(self, parameters: Mapping[nn.Parameter, nn.Parameter], own_buffers: bool) -> None:
        self._own_buffers = own_buffers
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}  # original -> own
        self._parameters = {id(old): new for old, new in parameters.items()}
        # Keeps the originals alive: an id is only unique among living objects.
        self._originals = list(parameters)
        self._modules: dict[int, nn.Module] = {}

    def module(self, original: nn.Module) -> nn.Module:
        known = self._modules.get(id(original))
        if known is not None:
            return known
        refuse_uncloneable_module("", original)
        clone: nn.Module = type(original).__new__(type(original))
        self._modules[id(original)] = clone  # before the attributes: they may point back
        state = clone.__dict__
        for name, value in original.__dict__.items():
            if name == "_parameters":
                state[name] = _same_type(
                    value, {key: self.parameter(item) for key, item in value.items()}
                )
            elif name == "_modules":
                children = {
                    key: None if child is None else self.module(child)
                    for key, child in value.items()
                }
                state[name] = _same_type(value, children)
            elif name == "_buffers" and self._own_buffers:
                own = {key: self.own_buffer(item) for key, item in value.items()}
                state[name] = _same_type(value, own)
            elif name == "_compiled_call_impl":
                state[name] = None  # a closure over the original module
            elif name in _SHARED_DICTS or "_hooks" in name:
                state[name] = value
            else:
                state[name] = self.attribute(value, depth=2)
        return clone

    def own_buffer(self, original: torch.Tensor | None) -> torch.Tensor | None:
        if original is None:
            return None
        if original not in self._buffers:  # tensors hash by identity
            self._buffers[original] = original.detach().clone()
        return self._buffers[original]

    def parameter(self, original: nn.Parameter | None) -> nn.Parameter | None:
        return self._parameters.get(id(original), original)

    def attribute(self, value: Any, depth: int) -> Any:
        """The clone's counterpart of a plain attribute; ``value`` itself if nothing is mapped."""
        if isinstance(value, nn.Parameter):
            return self.parameter(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.module(value.__self__))
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            mapped = tuple(self.attribute(part, depth) for part in parts)
            if all(new is old for new, old in zip(mapped, parts, strict=True)):
                return value
            return functools.partial(mapped[0], *mapped[1], **mapped[2])
        if isinstance(value, weakref.ref):
            target = value()
            if isinstance(target, nn.Parameter) and id(target) in self._parameters:
                return weakref.ref(self._parameters[id(target)])
            return value
        if depth == 0:
            return value
        if type(value) in (list, tuple):
            items = [self.attribute(item, depth - 1) for item in value]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return type(value)(items) if changed else value
        if type(value) is dict:
            pairs = {key: self.attribute(item, depth - 1) for key, item in value.items()}
            return pairs if any(pairs[key] is not value[key] for key in value) else value
        return value


def _same_type(original: Any, items: dict[str, Any]) -> Any:
    return items if type(original) is dict else type(original)(items)
