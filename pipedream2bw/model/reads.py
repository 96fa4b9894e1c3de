"""What Python code reads beside its arguments: attributes by name, globals, closures' variables.

It is found in the bytecode. Nothing runs, and nothing is read that the code does not name.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .replacing import items_in

# Of lists, dictionaries, sets and deques; and what names a result's place.
_WRITERS = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update", "add"),
        *("pop", "popleft", "popitem", "remove", "discard", "clear", "difference_update"),
        *("intersection_update", "symmetric_difference_update", "sort", "reverse", "rotate", "out"),
    )
)
_WRITING = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"))
_NOT_OWN = frozenset({"torch", "numpy", "pipedream2bw"}) | sys.stdlib_module_names


@dataclasses.dataclass
class Reads:
    """What some functions read, those that they call included.

    Attributes:
        names: of attributes that are read, whatever the object; texts in the code count as names,
            which ``getattr()`` may be given.
        assigned: names of attributes that are assigned.
        bindings: by (id of the holder, name): a dictionary of globals or a closure's cell.
        objects: whose methods are called, with the names that errors give them.
        written: names in lines that may write to a list, a dictionary, a set or a tensor.
    """

    names: set[str] = dataclasses.field(default_factory=set)
    assigned: set[str] = dataclasses.field(default_factory=set)
    bindings: dict[tuple[int, str], Any] = dataclasses.field(default_factory=dict)
    objects: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    written: set[str] = dataclasses.field(default_factory=set)
    _others: set[int] = dataclasses.field(default_factory=set)
    _classes: set[type] = dataclasses.field(default_factory=set)
    _seen: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, functions: Iterable[tuple[str, Any]], others: Iterable[object] = ()) -> Reads:
        """What functions, methods, modules and other objects read when they are called.

        Args:
            others: objects that the functions may know and do not call.
        """
        found = cls(_others=set(map(id, others)))
        for name, function in functions:
            found.follow(name, function)
        found._follow_methods()
        return found

    @classmethod
    def of_class(cls, kind: type[nn.Module]) -> Reads:
        """What the forward of a class of modules reads."""
        found = cls()
        found._classes.add(kind)
        found.names.add("forward")
        found._follow_methods()
        return found

    @classmethod
    def joined(cls, parts: Iterable[Reads]) -> Reads:
        """What all of them read."""
        found = cls()
        for part in parts:
            found.names |= part.names
            found.assigned |= part.assigned
            found.bindings.update(part.bindings)
            found.objects += part.objects
            found.written |= part.written
        return found

    def follow(self, name: str, value: Any) -> None:
        """Adds what a function or an object reads if it is called."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.MethodType):
            self.follow(name, value.__func__)
            self._add_object(name, value.__self__, called=False)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.follow(name, part)
        elif isinstance(value, types.FunctionType):
            self._scan(value)
            if (inside := inspect.unwrap(value)) is not value:
                self.follow(name, inside)
        elif isinstance(value, type):
            if not is_foreign(value):
                self._classes.add(value)
                self.names.update(("__init__", "__call__"))
                if issubclass(value, torch.autograd.Function):
                    self.names.update(("forward", "backward", "setup_context"))
        elif not isinstance(value, types.ModuleType) and _has_attributes(value):
            self._add_object(name, value, called=True)

    def _add_object(self, name: str, value: Any, *, called: bool) -> None:
        self.objects.append((name, value))
        is_other = id(value) in self._others
        if isinstance(value, nn.Module) or not is_foreign(type(value)):
            if not (called and is_other):
                self._classes.add(type(value))
            if called and not is_other:
                self.names.update(("forward", "__call__"))

    def items(self) -> list[tuple[str, Any]]:
        """As :meth:`variables`, and what lists, tuples and dictionaries among them hold."""
        return [(name, item) for name, value in self.variables() for item in items_in(value)]

    def variables(self) -> list[tuple[str, Any]]:
        """What the functions know, with names: objects, what they read of these, variables."""
        found = list(self.objects)
        for (_, name), holder in self.bindings.items():
            found.append((f"variable {name}", bound(holder, name)))
        for name, each in self.objects:
            if not isinstance(each, nn.Module) and hasattr(each, "__dict__"):
                held = vars(each).items()
                found += [(f"{name}.{key}", item) for key, item in held if key in self.names]
        return found

    def _scan(self, function: types.FunctionType) -> None:
        code = _scanned(function.__code__)
        self.names |= code["attribute"]
        self.assigned |= code["assigned"]
        self.written |= code["written"]
        if is_foreign(function):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places: list[tuple[str, Any]] = [each for each in cells if each[0] in code["variable"]]
        places += [(name, function.__globals__) for name in code["global"]]
        for name, holder in places:
            if name not in code["set"]:
                self.bindings[id(holder), name] = holder
                self.follow(name, bound(holder, name))

    def _follow_methods(self) -> None:
        """Adds the methods of known classes whose names are read, until there are no more."""
        before = -1
        while before != len(self._seen):
            before = len(self._seen)
            for kind in list(self._classes):
                for each in own_classes(kind):
                    for name, value in list(vars(each).items()):
                        if name in self.names:
                            method = getattr(value, "fget", getattr(value, "__func__", value))
                            if isinstance(method, types.FunctionType):
                                self.follow(name, method)


def bound(holder: Any, name: str, missing: Any = None) -> Any:
    """The variable's value in a cell or a dictionary of globals."""
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:  # not assigned yet
            return missing
    return holder.get(name, missing)


def own_classes(kind: type) -> list[type]:
    """The class and those that it is derived from, without nn.Module and object."""
    return [each for each in kind.__mro__ if each not in (nn.Module, object)]


def is_foreign(value: Any) -> bool:
    """Whether Python's, torch's or this package's authors wrote a function or a class."""
    return not is_own(str(getattr(value, "__module__", "")))


def is_own(module: str) -> bool:
    """Whether a module of that name may be the script's."""
    return module.partition(".")[0] not in _NOT_OWN


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


@functools.lru_cache(maxsize=4096)
def _scanned(code: types.CodeType) -> Mapping[str, set[str]]:
    """What one function's bytecode names, by the kinds of :data:`_KINDS`, and what it writes to."""
    found = {kind: set[str]() for kind in ("", "written", *_KINDS.values())}
    by_line: dict[int, set[str]] = {}
    writing: set[int] = set()
    for each in _with_inner(code):
        for constant in each.co_consts:
            parts = constant if isinstance(constant, tuple) else (constant,)
            texts = (part for part in parts if isinstance(part, str))
            found["attribute"].update(text for text in texts if text.isidentifier())
        line = 0
        for step in dis.get_instructions(each):
            line = _line_of(step) or line
            named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            names = {name for name in named if isinstance(name, str)}
            found[_KINDS.get(step.opname, "")].update(names)
            by_line.setdefault(line, set()).update(names)
            if step.opname in _WRITING or any(map(_writes, names)):
                writing.add(line)
    found["written"].update(*(by_line[line] for line in writing))
    return found


def _line_of(step: dis.Instruction) -> int | None:
    positions = getattr(step, "positions", None)  # from Python 3.11 on
    return step.starts_line if positions is None else positions.lineno


def _writes(name: str) -> bool:
    """Whether a method or an argument of that name writes to what has it."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITERS


def _with_inner(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


_KINDS = {
    "LOAD_ATTR": "attribute",
    "LOAD_METHOD": "attribute",
    "LOAD_SUPER_ATTR": "attribute",
    "STORE_ATTR": "assigned",
    "DELETE_ATTR": "assigned",
    "LOAD_GLOBAL": "global",
    "LOAD_NAME": "global",
    "LOAD_DEREF": "variable",  # of a closure
    "LOAD_CLASSDEREF": "variable",
    "LOAD_FROM_DICT_OR_DEREF": "variable",
    "LOAD_FROM_DICT_OR_GLOBALS": "global",
    "STORE_GLOBAL": "set",  # of globals and closures
    "STORE_DEREF": "set",
}
