"""Structural clones: the same modules over other parameters, without copying data.

One clone exists per weight version. Its modules are distinct objects whose Parameters are views of
that version's buffer; buffers and hooks are the very objects of the original. So running statistics
advance in one place, and every clone sees a hook that is registered later.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from .hooks import HooksOfClone
from .refusals import refuse_uncloneable
from .replacing import replaced, tensors_in

_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict)


def structural_clone(
    root: nn.Module,
    parameters: Mapping[nn.Parameter, nn.Parameter],
    buffers: Mapping[torch.Tensor, torch.Tensor] | None = None,
    *,
    on_trial: bool = False,
    hooked: Collection[nn.Module] = (),
) -> nn.Module:
    """Clones the module tree of ``root`` and puts ``parameters[p]`` where it holds parameter ``p``.

    Parameters that ``parameters`` lacks stay the original's, and so do buffers. The dictionaries of
    hooks are shared, and without ``buffers`` those of buffers, too. Plain attributes are shared
    except where they hold (directly, or in lists, tuples and dicts, at most two deep) parameters,
    modules or methods of the tree: those are mapped. A module reached twice is cloned once.

    Args:
        on_trial: for a forward that is only tried. Hooks that it registers are the clone's alone:
            the first forward of some models does that. So is what it puts into lists,
            dictionaries and sets of its modules.
        hooked: modules of ``root`` on which a forward registers hooks: on clones of these it does
            so for each one by itself.

    Raises:
        TypeError: a module keeps its parameters where Python cannot replace them (TorchScript, a
            module wrapped by ``torch.compile``).
    """
    cloner = _Cloner(parameters, buffers, on_trial=on_trial, hooked=set(map(id, hooked)))
    return cloner.module(root)


def copies_of_buffers(root: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Copies the buffers of ``root``, for a clone that must not write to these."""
    return {buffer: buffer.detach().clone() for buffer in root.buffers()}


def trial_copy(root: nn.Module) -> nn.Module:
    """A clone for a forward that is only tried, with copies of all tensors that it may write to."""
    weights = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in root.parameters()}
    state = {**copies_of_plain_tensors(root), **copies_of_buffers(root)}
    return structural_clone(root, weights, state, on_trial=True)


def copies_of_plain_tensors(root: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Copies the tensors in attributes of ``root`` that are neither parameters nor buffers."""
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    return {
        tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for module in root.modules()
        for _, tensor in tensors_in(module)
        if id(tensor) not in registered
    }


def copy_attributes(
    source: nn.Module, clone: nn.Module, names: Mapping[str, Collection[str]]
) -> None:
    """Gives the modules of ``clone`` attributes of their counterparts in ``source``.

    Args:
        names: of the attributes, by module. Those that ``source`` lacks are removed.
    """
    name_of = {id(module): name for name, module in source.named_modules()}

    def counterpart(item: Any) -> Any:
        if isinstance(item, types.MethodType) and id(item.__self__) in name_of:
            return types.MethodType(item.__func__, counterpart(item.__self__))
        name = name_of.get(id(item))
        return item if name is None else clone.get_submodule(name)

    for module, attributes in names.items():
        there, mine = vars(source.get_submodule(module)), vars(clone.get_submodule(module))
        for name in attributes:
            if name in there:
                mine[name] = replaced(there[name], counterpart)
            else:
                mine.pop(name, None)


class _Cloner:
    def __init__(
        self,
        parameters: Mapping[nn.Parameter, nn.Parameter],
        buffers: Mapping[torch.Tensor, torch.Tensor] | None,
        *,
        on_trial: bool,
        hooked: set[int],
    ) -> None:
        self._hooked = hooked
        self._on_trial = on_trial
        self._tensors: dict[Any, torch.Tensor] = {**parameters, **(buffers or {})}
        self._mapped = {"_parameters", "_modules"} | (
            {"_buffers"} if buffers is not None else set()
        )
        self._modules: dict[int, nn.Module] = {}  # by id of the original
        self._containers: dict[int, Any] = {}  # the same

    def module(self, original: nn.Module) -> nn.Module:
        known = self._modules.get(id(original))
        if known is not None:
            return known
        refuse_uncloneable("", original)
        clone: nn.Module = object.__new__(type(original))
        self._modules[id(original)] = clone  # before the attributes: they may point back
        state = clone.__dict__
        for name, value in original.__dict__.items():
            if name in self._mapped:
                state[name] = copy.copy(value)
                state[name].update((key, self._counterpart(item)) for key, item in value.items())
            elif name == "_compiled_call_impl":
                state[name] = None  # a closure over the original module
            elif name in _HOOKS:
                state[name] = self._hooks(original, value)
            elif name in ("_buffers", "_non_persistent_buffers_set"):
                state[name] = value
            else:
                state[name] = replaced(self._own(value), self._counterpart)
        return clone

    def _own(self, value: Any) -> Any:
        """A container that a forward on trial may change; modules that shared it share this one."""
        if not self._on_trial or type(value) not in _CONTAINERS:
            return value
        known = self._containers.get(id(value))
        if known is not None:
            return known
        own = self._containers[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            own.update((key, self._own(item)) for key, item in value.items())
        elif isinstance(value, list):
            own[:] = map(self._own, value)
        return own

    def _hooks(self, original: nn.Module, hooks: dict[int, Any]) -> Any:
        if self._on_trial:
            return copy.copy(hooks)
        return HooksOfClone(hooks) if id(original) in self._hooked else hooks

    def _counterpart(self, item: Any) -> Any:
        """Returns what the clone has in the place of ``item``."""
        if isinstance(item, torch.Tensor):
            return self._tensors.get(item, item)
        if isinstance(item, nn.Module):
            return self.module(item)
        if isinstance(item, types.MethodType) and isinstance(item.__self__, nn.Module):
            return types.MethodType(item.__func__, self.module(item.__self__))
        if isinstance(item, functools.partial):
            parts = (item.func, item.args, item.keywords)
            function, args, keywords = new = replaced(parts, self._counterpart, depth=3)
            return item if new is parts else functools.partial(function, *args, **keywords)
        return item
