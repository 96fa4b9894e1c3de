"""Dataclasses as JSON documents. A bad document is refused with the field, its value and the rule.

A document is an object with its format's name, the format's version and the fields of a dataclass.
Every field is read by its type hint: numbers, strings, tuples, dictionaries, None, dataclasses and
:data:`Unbounded`. A ValueError of a dataclass's ``__post_init__`` gets the path of the field.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

Unbounded = Annotated[float, "null in JSON if infinite"]
"""A number that may be infinite. JSON has no infinity, so a document has null for it."""

_Read = TypeVar("_Read")
_Document = TypeVar("_Document", bound="Document")

MOST_LEVELS = 200
"""Levels of lists and objects in each other: a reader calls itself for each, or twice."""

_SCALARS = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


class Field:
    """A value in a JSON document, and the path to it. Methods raise ValueError for another kind."""

    def __init__(self, value: Any, where: str = "") -> None:
        self.value = value
        self.where = where

    def fail(self, rule: str) -> NoReturn:
        """Raises ValueError with the field's path, its value and the rule."""
        raise ValueError(f"{self.where or 'the document'}: {shown(self.value)}, it must be {rule}")

    def fields(self, *names: str) -> list[Field]:
        """The fields of an object that has exactly these names, in their order."""
        if not isinstance(self.value, dict):
            self.fail(f"an object with the fields {', '.join(names)}")
        for name in names:
            if name not in self.value:
                given = ", ".join(map(str, itertools.islice(self.value, 20))) or "none"
                raise ValueError(f"{self._inner(name)}: missing, fields given: {given[:400]}")
        for name in self.value:
            if name not in names:
                raise ValueError(
                    f"{self._inner(name[:80])}: unknown, known fields: {', '.join(names)}"
                )
        return [Field(self.value[name], self._inner(name)) for name in names]

    def entries(self) -> dict[str, Field]:
        """The fields of an object with any names."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        return {name: Field(item, self._inner(name)) for name, item in self.value.items()}

    def items(self, length: int | None = None) -> list[Field]:
        """The items of a list, which has so many if a length is given."""
        if not isinstance(self.value, list):
            self.fail("a list")
        if length is not None and len(self.value) != length:
            raise ValueError(f"{self.where}: {len(self.value)} items, it must have {length}")
        return [Field(item, f"{self.where}[{index}]") for index, item in enumerate(self.value)]

    def read(self, made: type[_Read]) -> _Read:
        """The dataclass whose fields an object has."""
        hints = _hints(made)  # type: ignore[arg-type]  # for mypy a type variable is not hashable
        values = {
            name: item.read_as(hint)
            for (name, hint), item in zip(hints.items(), self.fields(*hints), strict=True)
        }
        try:
            return made(**values)
        except ValueError as error:
            raise ValueError(f"{self.where}.{error}" if self.where else str(error)) from None

    def read_as(self, hint: Any) -> Any:
        """The value as one of the type hint's."""
        if hint in _SCALARS:
            return self._scalar(hint)
        if hint is Any:
            return self.value
        if hint == Unbounded:
            return math.inf if self.value is None else self._scalar(float)
        if dataclasses.is_dataclass(hint):
            return self.read(typing.cast("type[Any]", hint))
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType:  # with None, or of a tuple and a type that is no list in JSON
            if self.value is None and types.NoneType in arguments:
                return None
            is_list = isinstance(self.value, list)
            others = [each for each in arguments if each is not types.NoneType]
            matching = [each for each in others if is_list == (typing.get_origin(each) is tuple)]
            return self.read_as((matching or others)[0])
        if origin is tuple:
            if arguments[-1] is ...:
                return tuple(item.read_as(arguments[0]) for item in self.items())
            items = self.items(len(arguments))
            return tuple(item.read_as(each) for item, each in zip(items, arguments, strict=True))
        if origin in (dict, Mapping):
            return {name: item.read_as(arguments[1]) for name, item in self.entries().items()}
        raise TypeError(f"{hint}: no type of a document's fields")

    def _scalar(self, kind: type) -> Any:
        allowed = (int, float) if kind is float else kind
        fits = isinstance(self.value, allowed) and isinstance(self.value, bool) == (kind is bool)
        if not fits:
            self.fail(_SCALARS[kind])
        if kind is not float:
            return self.value
        try:
            value = float(self.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.fail("a finite number")
        return value

    def _inner(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


@functools.cache
def _hints(made: type) -> dict[str, Any]:
    hints = typing.get_type_hints(made, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(made)}


def parse_document(text: bytes, kind: str, version: int) -> Field:
    """As :func:`fields_of`, of the document's text."""
    return fields_of(parse_json(text), kind, version)


def fields_of(document: Any, kind: str, version: int) -> Field:
    """The fields of a value in JSON that is of this format and version, without these two.

    Raises:
        ValueError: it is of another format or version.
    """
    if not isinstance(document, dict):
        raise ValueError(f"format: missing, it must be {kind!r}")
    for name, wanted in (("format", kind), ("version", version)):
        given = document.pop(name, None)
        if type(given) is not type(wanted) or given != wanted:
            raise ValueError(f"{name}: {shown(given)}, it must be {wanted!r}")
    return Field(document)


_SUM = re.compile(rb'\{"sum": "([0-9a-f]{8})",')


def check_sum(text: bytes) -> None:
    """Raises ValueError unless a document's text begins with the sum (CRC-32) of what follows."""
    begin = _SUM.match(text)
    if begin is None:
        raise ValueError(
            f"{len(text)} bytes that do not begin with a sum: they were damaged, or written by an "
            "earlier version; make the file again"
        )
    if zlib.crc32(text[begin.end() :]) != int(begin[1], 16):
        raise ValueError(
            f"{len(text)} bytes that do not have the sum they begin with: they were changed, or "
            "damaged, after they were written"
        )


def parse_json(text: bytes) -> Any:
    """The value in JSON's text, which says one thing: no name is twice in an object.

    Raises:
        ValueError: it is not JSON, a number is too large, or the nesting too deep.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repeated,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    check_nesting(value)
    return value


def check_nesting(value: Any, most: int = MOST_LEVELS) -> None:
    """Raises ValueError if lists and objects lie deeper in each other than a document may have."""
    level = [value]
    for _ in range(most):
        level = [
            item
            for each in level
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"lists and objects in each other: more than {most} levels")


def shown(value: object) -> str:
    """The value on one line, in the length of an error's text."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]}: it must be a finite number")
    return value


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:80]}: it is there twice")
    return found


class Document:
    """A base of dataclasses that are saved as JSON, under their format's name and version."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    HAS_SUM: ClassVar[bool] = False
    """Whether the text begins with the sum of what follows: then a changed file is refused."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """What :meth:`save` writes."""
        fields = _without_infinity(dataclasses.asdict(self))  # type: ignore[call-overload]
        document = {"format": self.FORMAT, "version": self.VERSION, **fields}
        text = f"{json.dumps(document, indent=1, allow_nan=False)}\n"
        if not self.HAS_SUM:
            return text
        rest = text.removeprefix("{")
        return f'{{"sum": "{zlib.crc32(rest.encode()):08x}",{rest}'

    @classmethod
    def load(cls: type[_Document], path: str | os.PathLike[str]) -> _Document:
        """Reads what :meth:`save` wrote, on any machine.

        Raises:
            ValueError: the file is not JSON, or of another format or version; it has a sum and was
                changed; or a field is
                missing, unknown, of another type, or does not fit the others: names it, its value
                and the rule.
            OSError: the file cannot be read.
        """
        try:
            text = Path(path).read_bytes()
            document = parse_document(text, cls.FORMAT, cls.VERSION)
            if cls.HAS_SUM:
                check_sum(text)
                del document.value["sum"]
            return document.read(cls)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def given_or_loaded(name: str, given: object, kind: type[_Document]) -> _Document:
    """The object that is given, or the one in the file whose path is given.

    Raises:
        TypeError: neither an object of the kind nor a path is given.
        ValueError, OSError: the file holds something else, or cannot be read.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, (str, os.PathLike)):
        return kind.load(given)
    raise TypeError(
        f"{name}: {type(given).__name__} given, it must be a {kind.__name__} or the path of one"
    )


def _without_infinity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_infinity(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_without_infinity(item) for item in value]
    return None if value == math.inf else value
