"""Rules of options, as data: what each may be, and which values do not go together.

A table of options is a dataclass whose fields :func:`option` makes; :func:`exclusions` reads a
table of what does not go together. Checks, settings and documents follow from both.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from ._C import Schedule
from .checks import bounds, check_number, check_whole_number


def shown(value: object) -> str:
    """A value in an error's text."""
    if isinstance(value, Schedule):
        return f"{value.name!r} (pipelines: {value.num_pipelines}, delays: {value.delay})"
    if isinstance(value, torch.device):
        return repr(str(value))
    if type(value) in (list, tuple):
        return f"[{', '.join(map(shown, cast(Iterable[object], value)))}]"
    if callable(value):
        module = getattr(value, "__module__", type(value).__module__)
        return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


class Kind(NamedTuple):
    """What an option may be: in words, a function of its name and value that refuses others."""

    words: str
    check: Callable[[str, Any], object]
    examples: tuple[Any, ...] = ()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes that options may name."""


def as_dtype(value: Any) -> Any:
    """The dtype of a name such as "bf16"; what is no such name as it is, for its check."""
    return DTYPES.get(value, value) if isinstance(value, str) else value


def as_name(value: Any) -> Any:
    """The name of a dtype that has one, the other way round."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(value, value) if isinstance(value, torch.dtype) else value


def number(*, below: float | None = None, or_none: bool = False) -> Kind:
    """A number above 0."""

    def check(name: str, value: object) -> None:
        if value is not None or not or_none:
            check_number(name, value, below=below)

    return Kind(f"a number {bounds(below=below)}{' or None' * or_none}", check, (1.0,))


def whole_number(at_least: int) -> Kind:
    """An int of at least this."""
    return Kind(
        f"an int, at least {at_least}",
        lambda name, value: check_whole_number(name, value, at_least=at_least),
        (at_least + 1,),
    )


def one_of(*known: object, kind: type | None = None) -> Kind:
    """One of the known values.

    Args:
        kind: of those that are not None: a value of another kind is a TypeError.
    """
    words = ", ".join(map(shown, known))

    def check(name: str, value: object) -> None:
        if kind is not None and value is not None:
            module = "torch." if kind is torch.dtype else ""
            none = " or None" if None in known else ""
            instance(f"a {module}{kind.__name__}{none}", kind).check(name, value)
        if value not in known:
            raise ValueError(f"{name}: {value!r}, known: {words}")

    return Kind(words, check, known)


def instance(words: str, *kinds: Any) -> Kind:
    """An object of one of these types."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, kinds):
            is_short = isinstance(value, (str, int, float, torch.dtype, type(None)))
            given = repr(value) if is_short else type(value).__name__
            raise TypeError(f"{name}: {given} given, it must be {words}")

    return Kind(words, check)


BOOL = one_of(True, False, kind=bool)
FUNCTION = instance("callable", Callable)


def option(
    default: Any = None,
    kind: Kind | None = None,
    *,
    agreed: bool = True,
    saved: bool = False,
    examples: tuple[Any, ...] = (),
) -> Any:
    """A field of a table.

    Args:
        kind: what it may be; None: what its type says, checked where it is used.
        agreed: whether it must be equal on all ranks.
        saved: whether checkpoints have it, or a state that it alone makes.
        examples: further ones than its kind's, of which exclusions name some.
    """
    metadata = {"kind": kind, "agreed": agreed, "saved": saved, "examples": examples}
    return dataclasses.field(default=default, metadata=metadata)


def check_values(table: type, values: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError, naming the option, for a value that it may not have."""
    for field in dataclasses.fields(table):
        if field.name in values and field.metadata["kind"] is not None:
            field.metadata["kind"].check(field.name, values[field.name])


def settings(options: Any) -> dict[str, Any]:
    """The options of a table that must be equal on all ranks."""
    names = [field.name for field in dataclasses.fields(options) if field.metadata["agreed"]]
    return {name: comparable(getattr(options, name)) for name in names}


def comparable(value: object) -> Any:
    """A value as ranks compare it: numbers as numbers, functions as such, anything else as text."""
    if isinstance(value, Mapping) and any(map(callable, value.values())):
        value = list(value)  # names of functions
    elif callable(value):
        return "a function"
    return value if isinstance(value, (int, float)) else str(value)


# ---------------------------------------------------------------- what does not go together


class Values(NamedTuple):
    """Some values of an option or a fact: in words, and a function that knows them."""

    words: str
    hold: Callable[[Any], bool]


class Exclusion(NamedTuple):
    """What does not go together.

    Attributes:
        values: of each option, or fact about the pipeline, by its name.
        why: they exclude each other.
        instead: what to do.
    """

    values: Mapping[str, Values]
    why: str
    instead: str


KNOWN: Mapping[str, Callable[[Any], bool]] = {
    "given": lambda value: value is not None and value is not False,
    "a function": callable,
    "of two pipelines": lambda schedule: schedule.num_pipelines > 1,
    "of several delays": lambda schedule: not schedule.has_one_delay,
    "of several delays or above 1": lambda schedule: (
        not schedule.has_one_delay or schedule.delay[0] > 1
    ),
    "of another type than cpu": lambda device: device.type != "cpu",
    "some": bool,
}
"""Values that tables of exclusions name, beside "above 1", "'torch'" and "not 'torch'"."""


def exclusions(
    text: str, known: Mapping[str, Callable[[Any], bool]] | None = None
) -> tuple[Exclusion, ...]:
    """Reads a table: ``name: values, name: values``, and indented ``why => what to do instead``.

    Args:
        known: values of this table alone.
    """
    found: list[Exclusion] = []
    for row in text.strip().replace("\n    ", " ").splitlines():
        heads, _, rule = row.partition(" | ")
        why, _, instead = rule.partition(" => ")
        values = {}
        for head in heads.split(", "):
            name, _, words = head.partition(": ")
            values[name] = Values(words, _holding(words, {**KNOWN, **(known or {})}))
        found.append(Exclusion(values, why, instead))
    return tuple(found)


def _holding(words: str, known: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    first, _, rest = words.partition(" ")
    if words in known:
        return known[words]
    if first == "above":
        return lambda value: bool(value > int(rest))
    wanted = ast.literal_eval(rest if first == "not" else words)
    return lambda value: bool(value == wanted) == (first != "not")


def refuse(rules: Iterable[Exclusion], facts: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the rule and the values, if an exclusion holds.

    Args:
        facts: options and what follows from them, all that the exclusions name.
    """
    for values, why, instead in rules:
        given = {name: facts[name] for name in values}
        if all(values[name].hold(value) for name, value in given.items()):
            both = ", ".join(f"{name}: {shown(value)}" for name, value in given.items())
            raise ValueError(f"{both}: {why}: {instead}")


def among(rules: Iterable[Exclusion], names: Iterable[str]) -> list[Exclusion]:
    """The exclusions that name these options and facts alone."""
    known = set(names)
    return [each for each in rules if each.values.keys() <= known]
