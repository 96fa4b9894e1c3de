"""Where a forward may take numbers from that no argument gives: generators and clocks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .reads import Reads, bound, is_own
from .replacing import attributes_of, items_in

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")


class RandomnessError(Exception):
    """The forward takes a number that every run of the captured program would repeat."""


class Sources:
    """The process's generators, and those that a model's code knows; what is taken is noticed.

    Args:
        root: the model; None: the process's generators alone.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        # A name, what gives the state, and what sets it.
        self._generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
            ("random", random.getstate, random.setstate),
            ("torch", torch.get_rng_state, torch.set_rng_state),
        ]
        self.read: list[str] = []  # what other calls gave
        self.known: list[tuple[dict[str, Any], str]] = []  # globals that the code knows
        if (numpy := sys.modules.get("numpy")) is not None:
            get = functools.partial(numpy.random.get_state, legacy=False)
            self._generators.append(("numpy.random", get, numpy.random.set_state))
        if root is not None:
            self._look_into(root)

    def _look_into(self, root: nn.Module) -> None:
        functions = []
        for name, module in root.named_modules():
            for key, value in attributes_of(module):
                place = f"{name}.{key}" if name else key
                for item in items_in(value):
                    self._add(place, item)
                functions += [(place, value)] if isinstance(value, types.FunctionType) else []
        of_classes = map(Reads.of_class, {type(module) for module in root.modules()})
        for (_, name), holder in Reads.joined([*of_classes, Reads.of(functions)]).bindings.items():
            for item in items_in(bound(holder, name)):
                self._add(name, item)
            if isinstance(holder, dict):
                self.known.append((holder, name))

    def _add(self, name: str, item: Any) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
            self._generators.append((name, item.getstate, item.setstate))
        elif isinstance(item, torch.Generator):
            self._generators.append((name, item.get_state, item.set_state))
        elif numpy is not None and isinstance(item, numpy.random.RandomState):
            get = functools.partial(item.get_state, legacy=False)
            self._generators.append((name, get, item.set_state))
        elif numpy is not None and isinstance(item, numpy.random.Generator):
            bits = item.bit_generator
            put = functools.partial(setattr, bits, "state")
            self._generators.append((name, lambda: bits.state, put))

    def now(self) -> list[Any]:
        """The states of the generators, and how often something else was read."""
        return [len(self.read), *(get() for _, get, _ in self._generators)]

    def restore(self, states: list[Any]) -> None:
        """Sets the generators back."""
        del self.read[states[0] :]
        for (_, _, put), state in zip(self._generators, states[1:], strict=True):
            put(state)

    def refuse_taken(self, before: list[Any]) -> None:
        """Raises RandomnessError if a number was taken since :meth:`now` gave ``before``."""
        for name in self.read[before[0] :]:
            raise RandomnessError(
                f"{name}() is called in Python, which gives other values each time"
            )
        for (name, get, _), old in zip(self._generators, before[1:], strict=True):
            if _plain(get()) != _plain(old):
                raise RandomnessError(
                    f"random numbers are drawn in Python ({name}), independently of the input"
                )


def _plain(state: Any) -> Any:
    """A generator's state with bytes in the places of arrays, which do not compare to a bool."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextlib.contextmanager
def sources_kept(root: nn.Module | None = None) -> Iterator[Sources]:
    """Sets generators back to their present states at the end.

    Args:
        root: a model whose generators are kept, too, and whose calls of clocks are noticed.
    """
    sources = Sources(root)
    states = sources.now()
    try:
        with _noticed(sources) if root is not None else contextlib.nullcontext():
            yield sources
    finally:
        sources.restore(states)


@contextlib.contextmanager
def _noticed(sources: Sources) -> Iterator[None]:
    thread = threading.get_ident()

    def noticing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            is_seeded = name.endswith("default_rng") and (args or kwargs)
            frame = inspect.currentframe()
            caller = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
            if threading.get_ident() == thread and is_own(caller) and not is_seeded:
                sources.read.append(name)
            return call(*args, **kwargs)

        return noticed

    modules = [(time, name) for name in _CLOCKS] + [(os, "urandom")]
    if (numpy := sys.modules.get("numpy")) is not None:
        modules.append((numpy.random, "default_rng"))
    calls = {id(call := getattr(m, name)): (f"{m.__name__}.{name}", call) for m, name in modules}
    places = [(vars(module), name) for module, name in modules] + sources.known
    before = [
        (holder, name, holder[name]) for holder, name in places if id(holder.get(name)) in calls
    ]
    for holder, name, call in before:
        holder[name] = noticing(*calls[id(call)])
    try:
        yield
    finally:
        for holder, name, call in before:
            holder[name] = call
