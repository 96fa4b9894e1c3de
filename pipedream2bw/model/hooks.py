"""Hooks of the user's modules: which of them the stages can run, and those of clones."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any

from torch import fx, nn


def has_hooks(module: nn.Module) -> bool:
    """Tells whether a call of the module runs hooks."""
    return any(_hooks_by_kind(module))


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yields the hooks that a call of the module runs."""
    return itertools.chain.from_iterable(_hooks_by_kind(module))


class HookedError(Exception):
    """An exported graph would not run the hooks of a module: it calls none."""


def refuse_hooks(root: nn.Module) -> None:
    """Raises HookedError if a module has hooks.

    Those of torch.nn.utils may stay: they compute weights, which an exported graph then does.
    """
    for name, module in root.named_modules():
        for hook in hooks_of(module):
            if not type(hook).__module__.startswith("torch.nn.utils."):
                raise HookedError(f"{name} has hooks, which an exported graph would not run")


def _hooks_by_kind(module: nn.Module) -> Iterator[Collection[Callable[..., Any]]]:
    yield module._forward_hooks.values()
    yield module._forward_pre_hooks.values()
    yield module._backward_hooks.values()
    yield module._backward_pre_hooks.values()


def hooked_by_forward(root: nn.Module, called: nn.Module) -> set[str]:
    """Names of the modules on which a forward of a clone has registered hooks.

    Args:
        root: the clone's original.
        called: the clone, with dictionaries of hooks of its own.
    """
    counterparts = dict(called.named_modules())
    return {
        name
        for name, module in root.named_modules()
        if name in counterparts
        and any(
            len(mine) < len(theirs)
            for mine, theirs in zip(
                _hooks_by_kind(module), _hooks_by_kind(counterparts[name]), strict=True
            )
        )
    }


def called_by(graph: fx.Graph, root: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that a graph calls, or gives to a function, and those inside them."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            with contextlib.suppress(AttributeError):  # a parameter's name
                yield from root.get_submodule(str(node.target)).modules()


class HooksOfClone(collections.ChainMap[int, Any]):
    """The hooks of an original, and with them those that a forward of its clone registers.

    The clone's own are as such a forward means them: they may know the clone, and its attributes
    may say that they are there. What is removed is removed from the original, too, as where clones
    have its dictionary.
    """

    def __init__(self, original: MutableMapping[int, Any]) -> None:
        super().__init__({}, original, collections.OrderedDict())  # the last map's come first

    def move_to_end(self, key: int, last: bool = True) -> None:
        """As an OrderedDict's, of which torch asks it for a new hook that is to run first."""
        if not last:
            first = self.maps[2]
            first[key] = self.maps[0].pop(key)
            first.move_to_end(key, last=False)  # type: ignore[attr-defined]

    def __delitem__(self, key: int) -> None:
        for hooks in self.maps:
            hooks.pop(key, None)

    def clear(self) -> None:
        for hooks in self.maps:
            hooks.clear()
