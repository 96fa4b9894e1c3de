"""What a script may change of a model after its pipeline is made, watched for changes.

Stages compute with captured programs and with copies of the model's modules. So what the code of
the model reads of Python is compared before each train_step and evaluation: modules' attributes,
objects and containers in them, attributes of classes, globals, variables of closures. What no code
reads by its name is not looked at.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import types
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .hooks import hooks_of
from .reads import Reads, bound, is_foreign, is_own, own_classes
from .replacing import OF_EVERY_MODULE, items_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.defaultdict)
_OF_EVERY_MODULE = OF_EVERY_MODULE - {"training", "_is_full_backward_hook"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRITTEN_BY_SAVING = {"dtype"}
"""What transformers' save_pretrained() writes into a configuration, on the rank that calls it."""
_MOST_ITEMS = 64
"""A list, a dictionary or a set of more items is compared as one object."""
_DEEPEST = 3
"""How many objects and containers inside one another are looked into."""


class _Value:
    """An object, kept alive, that equals itself, and the same number or text of the same type."""

    def __init__(self, value: Any) -> None:
        self.value = value
        parts = value if isinstance(value, (tuple, frozenset)) else (value,)
        self.is_plain = all(isinstance(part, _PLAIN) for part in parts)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Value)
        one, two = self.value, other.value
        if one is two or type(one) is not type(two):
            return one is two
        # Each access to a method makes another object.
        is_method = isinstance(one, types.MethodType)
        return (is_method or (self.is_plain and other.is_plain)) and bool(one == two)

    def __hash__(self) -> int:
        is_method = isinstance(self.value, types.MethodType)
        return hash(self.value) if self.is_plain or is_method else id(self.value)

    def __str__(self) -> str:
        if self.value is _MISSING:
            return "missing"
        return repr(self.value) if self.is_plain else f"another {type(self.value).__name__}"


_MISSING = object()
_GONE = _Value(_MISSING)
"""Stands for a value that is not there."""


@dataclasses.dataclass
class _Place:
    """Values that are compared together.

    Attributes:
        holder: a dictionary, a list, a set, a cell, or another object with attributes.
        name: what errors put before the key of one of its values.
        keys: which of the values; empty: all of a container.
        module: whose attributes they are, of which each clone has its own; None: code reads them
            where they are, when it runs.
        is_program: whether captured programs depend on them.
        must_stay: why none of them may change.
        is_counted: while it is empty its length is compared, together with others'.
    """

    holder: Any
    name: str
    keys: tuple[str, ...] = ()
    module: str | None = None
    is_program: bool = True
    must_stay: str | None = None
    is_counted: bool = False
    values: dict[Any, _Value] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.values = self.read()

    def getter(self) -> Callable[[], Any]:
        """Gives the values of the keys in a tuple, without a line of Python."""
        holder = vars(self.holder) if isinstance(self.holder, type) else self.holder
        keys = ("cell_contents",) if isinstance(holder, types.CellType) else self.keys
        is_mapping = isinstance(holder, (dict, types.MappingProxyType))
        make: Callable[..., Any] = operator.itemgetter if is_mapping else operator.attrgetter
        get = make(*keys, keys[0])  # of one key alone it gives no tuple
        return functools.partial(get, holder)

    def read(self) -> dict[Any, _Value]:
        """The values by key."""
        holder = self.holder
        if isinstance(holder, (dict, types.CellType)):
            keys: Iterable[Any] = self.keys or tuple(holder)  # type: ignore[arg-type]
            return {key: _Value(bound(holder, key, _MISSING)) for key in keys}
        if self.keys:
            return {key: _Value(getattr(holder, key, _MISSING)) for key in self.keys}
        if isinstance(holder, (set, frozenset)):
            return {"items": _Value(frozenset(holder))}
        return {number: _Value(value) for number, value in enumerate(holder)}

    def changes(self) -> Iterator[tuple[str, _Value, _Value]]:
        """Yields, for each value that has changed, its name, what it was and what it is."""
        now = self.read()
        for key in dict.fromkeys((*self.values, *now)):
            old, new = self.values.get(key, _GONE), now.get(key, _GONE)
            if old != new:
                yield self.named(key), old, new

    def named(self, key: Any) -> str:
        """What errors call a value."""
        return f"{self.name}{key}" if self.keys else f"{self.name}[{key!r}]"


_Change = tuple[_Place, str, _Value, _Value]
"""Where, the name, the old and the new value."""


class Watch:
    """Compares what a model's code reads with what it was.

    Args:
        functions: those that stages call later than the script: the loss, the metrics. With names.
        written: names of buffers that the model's forwards are known to write.
        called: the modules whose own call stages make, so that hooks run.
        is_recorded: whether what the functions compute is recorded, numbers as they are.
        is_compiled: whether the forwards are, whose updates of statistics count as writes of them.

    Attributes:
        state: what captured programs depend on, when it was last looked at. It can be hashed.
        digest: a number that is the same on ranks whose states have changed alike since the
            beginning. What ranks begin with may differ: their own numbers, paths.
    """

    def __init__(
        self,
        root: nn.Module,
        functions: Iterable[tuple[str, Any]],
        written: Collection[str],
        called: Iterable[nn.Module],
        *,
        is_recorded: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self._root = root
        self._search = functools.partial(
            _Search,
            root,
            list(functions),
            written,
            set(map(id, called)),
            is_recorded=is_recorded,
            is_compiled=is_compiled,
        )
        self._is_new = True  # scripts define variables after they have made the pipeline
        self._found: list[_Change] = []
        self._first_places = list(self._search().places())  # whose holders stay alive
        self._first = _state(self._first_places)
        self._take(self._first_places)

    def _take(self, places: list[_Place]) -> None:
        self._all = places
        self._told: set[tuple[str, _Value]] = set()
        compared = [place for place in places if not place.is_counted or place.holder]
        containers = [place.holder for place in compared if not place.keys]
        self._views = [each.values() if isinstance(each, dict) else each for each in containers]
        self._getters: list[Callable[[], Any]] = []
        for place in compared:
            with contextlib.suppress(Exception):  # a property of the user's raises one
                if place.keys:
                    get = place.getter()
                    get()
                    self._getters.append(get)
        self._values = list(self._now())
        self._counted = [place.holder for place in places if place.is_counted] + containers
        self._counted += map(vars, self._root.modules())
        self._lengths = list(map(len, self._counted))
        self._followed = _state(places)
        self._set_state(self._followed)

    def _set_state(self, state: frozenset[tuple[int, str, _Value]]) -> None:
        self.state = state
        changed = sorted((name, str(value)) for _, name, value in state - self._first)
        self.digest = zlib.crc32(repr(changed).encode()) if changed else 0

    def look(self, *, running: bool) -> bool:
        """Whether stages have to follow a change since the last :meth:`follow`.

        Args:
            running: whether batches may be being computed.

        Raises:
            ValueError: they cannot follow it, or not at this time.
        """
        if self._is_as_it_was():
            if self.state is not self._followed:  # a change was undone
                self._set_state(self._followed)
            return False
        self._is_new = False
        now = list(self._search().places())
        self._found = list(_changes(self._all, now))
        for place, name, old, new in self._found:
            if place.must_stay is not None:
                raise ValueError(f"{name} is {new}, it was {old}: {place.must_stay}")
            if place.module is not None:
                self._refuse_weights(name, new.value)
        if running:
            self._refuse_late(self._found)
        if any(place.is_program for place, *_ in self._found):
            self._set_state(_state(now))
            return True
        self._take(now)
        return False

    def look_late(self) -> None:
        """Before a drain: raises ValueError if what is being computed has changed meanwhile."""
        if not self._is_as_it_was():
            self._refuse_late(list(_changes(self._all, self._search().places())))

    def _is_as_it_was(self) -> bool:
        if self._is_new:
            return False
        try:  # loops of Python's own; to compare tensors would compute
            same = list(map(len, self._counted)) == self._lengths
            return same and all(map(operator.is_, self._now(), self._values))
        except Exception:  # a value is gone
            return False

    def _now(self) -> Iterator[Any]:
        each = itertools.chain.from_iterable
        return itertools.chain(each(get() for get in self._getters), each(self._views))

    def _refuse_late(self, changes: Iterable[_Change]) -> None:
        for place, name, old, new in changes:
            is_found = old == _GONE and place.keys  # it may have been there before
            if place.module is None and not is_found and (name, new) not in self._told:
                self._told.add((name, new))  # once: a run may go on
                raise ValueError(
                    f"{_in_words(name, old, new)} while batches were being computed, which may "
                    "have read either. Call flush() before you change it. Give what changes with "
                    "each batch in target=, or as an argument of the model"
                )

    def _refuse_weights(self, name: str, value: Any) -> None:
        mine = {*map(id, self._root.modules()), *map(id, self._root.parameters())}
        for item in items_in(value):
            if isinstance(item, (nn.Module, nn.Parameter)) and id(item) not in mine:
                raise ValueError(f"{name} holds a new {type(item).__name__}: {_MADE_ANEW}")

    def follow(self) -> dict[str, list[str]]:
        """Takes what is there for what was; gives the attributes that have changed, by module."""
        changed: dict[str, list[str]] = {}
        for place, name, _, _ in self._found:
            if place.module is not None:
                changed.setdefault(place.module, []).append(name.removeprefix(place.name))
        self._take(list(self._search().places()))
        return changed

    def names_of_changes(self) -> list[str]:
        """What :meth:`look` has found to have changed."""
        return [name for _, name, _, _ in self._found]


_MADE_ANEW = (
    "stages have the weights and modules that the model had when the pipeline was made. Load "
    "values by load_state_dict(). For other modules close the pipeline and make it anew"
)


_HOOKS_OF_MODEL = "stages call parts of the model; register hooks on modules inside it"


def _in_words(name: str, old: _Value, new: _Value) -> str:
    if name.endswith("._version"):
        return f"{name.removesuffix('._version')} was written to"
    return f"{name} is {new}, it was {old}: it was changed"


def _state(places: Iterable[_Place]) -> frozenset[tuple[int, str, _Value]]:
    """Which holder has which value under which name."""
    return frozenset(
        (id(place.holder), place.named(key), value)
        for place in places
        if place.is_program
        for key, value in place.values.items()
    )


def _changes(before: Iterable[_Place], now: Iterable[_Place]) -> Iterator[_Change]:
    known: dict[tuple[int, str, bool], _Place] = {}
    for place in before:
        known[id(place.holder), place.name, place.is_program] = place
        for name, old, new in place.changes():
            yield place, name, old, new
    for place in now:
        old_keys: Collection[Any] = ()
        if (earlier := known.get((id(place.holder), place.name, place.is_program))) is not None:
            old_keys = earlier.values
        elif place.module is None and place.must_stay is None:
            continue  # in an object that is new, and told of by itself
        if place.keys or earlier is None:
            for key, value in place.values.items():
                if key not in old_keys:
                    yield place, place.named(key), _GONE, value


class _Search:
    """Finds the places that a model's code and some functions read."""

    def __init__(
        self,
        root: nn.Module,
        functions: list[tuple[str, Any]],
        written: Collection[str],
        called: set[int],
        *,
        is_recorded: bool,
        is_compiled: bool,
    ) -> None:
        self._called = called
        self._is_recorded, self._is_compiled = is_recorded, is_compiled
        self._modules = dict(root.named_modules())
        self._written = written
        self._reads = {type(m): Reads.of_class(type(m)) for m in self._modules.values()}
        held: list[tuple[str, Any]] = [
            (f"{name}.{key}" if name else key, value)
            for name, module in self._modules.items()
            for key, value in vars(module).items()
            if isinstance(value, _FUNCTIONS)
        ]
        held += [
            (f"hook of {name}", hook)
            for name, module in self._modules.items()
            for hook in hooks_of(module)
        ]
        of_held = Reads.of(held, self._modules.values())
        self._of_model = Reads.joined([*self._reads.values(), of_held])
        self._of_functions = Reads.of(functions, self._modules.values())
        self._names = _own_names(self._of_model.names)
        tensors = (*root.parameters(), *root.buffers())
        self._seen = {*map(id, self._modules.values()), *map(id, tensors)}
        self._assigned = self._of_model.assigned | self._of_functions.assigned
        for reads in (self._of_model, self._of_functions):
            written_to = (value for name, value in reads.variables() if _writes_to(name, reads))
            self._seen.update(map(id, written_to))

    def places(self) -> Iterator[_Place]:
        for name, module in self._modules.items():
            yield from self._of_module(name, module)
        for kind in self._reads:
            yield from self._of_class(kind)
        yield from self._of_reads(self._of_model, is_program=True)
        yield from self._of_reads(self._of_functions, is_program=self._is_recorded)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[_Place]:
        prefix = f"{name}." if name else ""
        reads, mine = self._reads[type(module)], vars(module)
        keys = [
            key
            for key in mine
            if key in ("training", "_is_full_backward_hook")
            or (key in self._names and key not in reads.assigned and key not in _OF_EVERY_MODULE)
        ]
        yield _Place(mine, prefix, tuple(keys), module=name)
        for fixed in (module._parameters, module._modules):
            yield _Place(
                fixed,
                prefix,
                tuple(fixed),
                is_program=False,
                must_stay=_MADE_ANEW,
                is_counted=True,
            )
        for hooks in _HOOKS:
            yield _Place(
                mine[hooks],
                f"{prefix}{hooks}",
                is_program=id(module) not in self._called,
                must_stay=None if name else _HOOKS_OF_MODEL,
                is_counted=True,
            )
        yield from self._of_buffers(prefix, module)
        for key in keys:
            if key not in reads.written:
                yield from self._inside(f"{prefix}{key}", mine[key], reads.assigned, 0, True)

    def _of_buffers(self, prefix: str, module: nn.Module) -> Iterator[_Place]:
        there = {key: each for key, each in module._buffers.items() if each is not None}
        kept = [key for key in there if f"{prefix}{key}" not in self._written]
        kept = [key for key in kept if key not in self._assigned | self._of_model.written]
        is_norm = isinstance(module, _NormBase)
        if not is_norm:  # a recompute puts others in the places of its statistics, for a while
            yield from _some(module._buffers, prefix, kept, is_program=False)
        for key, buffer in there.items():
            # torch's kernel that updates statistics does not count as a write, compiled code does.
            is_statistic = is_norm and key != "num_batches_tracked"
            if not self._is_compiled if is_statistic else key in kept:
                yield from _writes(f"{prefix}{key}", buffer, is_program=False)

    def _of_class(self, kind: type) -> Iterator[_Place]:
        for each in own_classes(kind):
            keys = tuple(key for key in vars(each) if key in self._names)
            if keys and not is_foreign(each) and id(each) not in self._seen:
                self._seen.add(id(each))
                yield _Place(each, f"{each.__name__}.", keys)

    def _of_reads(self, reads: Reads, *, is_program: bool) -> Iterator[_Place]:
        by_holder: dict[int, tuple[Any, list[str]]] = {}
        for (number, name), holder in reads.bindings.items():
            by_holder.setdefault(number, (holder, []))[1].append(name)
        inside: list[tuple[str, Any]] = list(reads.objects)
        for holder, read in by_holder.values():
            is_cell = isinstance(holder, types.CellType)
            label = "variable " if is_cell else f"global {holder.get('__name__', '')}."
            there = [name for name in read if bound(holder, name, self) is not self]
            yield from _some(holder, label, there, is_program)
            inside += [(f"{label}{name}", bound(holder, name)) for name in there]
        names, self._names = self._names, self._names | _own_names(reads.names)
        for name, value in inside:
            yield from self._inside(name, value, self._assigned, 0, is_program)
        self._names = names

    def _inside(
        self, name: str, value: Any, assigned: set[str], depth: int, is_program: bool
    ) -> Iterator[_Place]:
        """What a value holds, looked at where it is."""
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        inner: list[tuple[str, Any]] = []
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                yield from _writes(name, value, is_program=is_program)
        elif type(value) in _CONTAINERS:
            if len(value) <= _MOST_ITEMS:
                if not isinstance(value, tuple):
                    yield _Place(value, name, is_program=is_program)
                items = value.items() if isinstance(value, dict) else enumerate(value)
                inner += [(f"{name}[{key!r}]", item) for key, item in items]
        elif isinstance(value, types.ModuleType):
            if is_own(value.__name__):
                keys = [k for k, v in vars(value).items() if isinstance(v, _PLAIN)]
                keys = [k for k in keys if k in self._names and not k.startswith("__")]
                yield from _some(value, f"{name}.", keys, is_program)
        elif not isinstance(value, _FUNCTIONS) and hasattr(value, "__dict__"):
            kind = value if isinstance(value, type) else type(value)
            if isinstance(value, nn.Module) or kind in _RECORDS or not is_foreign(kind):
                names = self._names - assigned - _OF_EVERY_MODULE - _WRITTEN_BY_SAVING
                keys = [k for k in vars(value) if k in names]
                holder = vars(value) if isinstance(value, dict) else value
                yield from _some(holder, f"{name}.", keys, is_program)
                inner += [(f"{name}.{k}", getattr(value, k)) for k in keys]
                if isinstance(value, nn.Module):
                    inner += [(f"{name}.{k}", child) for k, child in value.named_children()]
        for inner_name, item in inner:
            yield from self._inside(inner_name, item, assigned, depth + 1, is_program)


def _writes_to(name: str, reads: Reads) -> bool:
    """Whether code may write to a list, a dictionary or a tensor that it knows by that name."""
    return name.rpartition(".")[2].rpartition(" ")[2] in reads.written


def _own_names(names: Iterable[str]) -> frozenset[str]:
    """Without those that Python gives to every object."""
    return frozenset(name for name in names if not name.startswith("__"))


def _some(holder: Any, name: str, keys: list[str], is_program: bool) -> Iterator[_Place]:
    if keys:
        yield _Place(holder, name, tuple(keys), is_program=is_program)


def _writes(name: str, tensor: torch.Tensor, *, is_program: bool) -> Iterator[_Place]:
    """What tells of writes to a tensor in place."""
    if not tensor.is_inference():
        yield _Place(tensor, f"{name}.", ("_version",), is_program=is_program)
