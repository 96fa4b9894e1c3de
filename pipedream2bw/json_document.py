"""Reading JSON whose every field is checked: errors name the field and what it holds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

_Item = TypeVar("_Item")


_Loadable = TypeVar("_Loadable", bound="_CanLoad")


class _CanLoad(Protocol):
    @classmethod
    def load(cls: type[_Loadable], path: str | os.PathLike[str], /) -> _Loadable: ...


class Field:
    """A value in a JSON document, and where it is.

    Every method raises ValueError if the value is not of that kind.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        self.value = value
        self.where = where

    def fail(self, rule: str) -> NoReturn:
        """Raises ValueError: the field, its value and the rule."""
        shown = " ".join(repr(self.value).split())
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise ValueError(f"{self.where or 'the document'}: {shown}, it must be {rule}")

    def fields(self, *names: str) -> list[Field]:
        """Those of an object that has these and no others."""
        if not isinstance(self.value, dict):
            self.fail(f"an object with the fields {', '.join(names)}")
        for name in names:
            if name not in self.value:
                raise ValueError(
                    f"{self._inner(name)}: missing, fields given: {', '.join(self.value) or 'none'}"
                )
        for name in self.value:
            if name not in names:
                raise ValueError(f"{self._inner(name)}: unknown, known fields: {', '.join(names)}")
        return [Field(self.value[name], self._inner(name)) for name in names]

    def entries(self) -> dict[str, Field]:
        """Those of an object with any names."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        return {name: Field(item, self._inner(name)) for name, item in self.value.items()}

    def each(self, read: Callable[[Field], _Item], length: int | None = None) -> tuple[_Item, ...]:
        """The items of a list."""
        if not isinstance(self.value, list):
            self.fail("a list")
        if length is not None and len(self.value) != length:
            raise ValueError(f"{self.where}: {len(self.value)} items, it must have {length}")
        return tuple(
            read(Field(item, f"{self.where}[{index}]")) for index, item in enumerate(self.value)
        )

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.fail("a string")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value

    def whole(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail("a whole number")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            self.fail("a number")
        try:
            value = float(self.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.fail("a finite number")
        return value

    def _inner(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


def read_document(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """The fields of a JSON file of this format and version, without these two.

    Raises:
        ValueError: it is no JSON, of another format or of another version.
        OSError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"format: missing, it must be {kind!r}")
    for name, wanted in (("format", kind), ("version", version)):
        given = document.pop(name, None)
        if type(given) is not type(wanted) or given != wanted:
            raise ValueError(f"{name}: {given!r}, it must be {wanted!r}")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number there")


def given_or_loaded(name: str, given: object, kind: type[_Loadable]) -> _Loadable:
    """What is given, or what the file holds whose path is given.

    Raises:
        TypeError: it is neither of the kind nor a path.
        ValueError, OSError: the file holds something else, or cannot be read.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, (str, os.PathLike)):
        return kind.load(given)
    raise TypeError(
        f"{name}: {type(given).__name__} given, it must be a {kind.__name__} or the path of one"
    )


Made = TypeVar("Made")


def write_json(value: Any, path: str | os.PathLike[str], *, kind: str, version: int) -> None:
    """Writes a dataclass's fields, below the format's name and version."""
    fields = {"format": kind, "version": version, **dataclasses.asdict(value)}
    text = json.dumps(fields, indent=1, allow_nan=False)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def read_json(made: type[Made], path: str | os.PathLike[str], *, kind: str, version: int) -> Made:
    """A dataclass from what :func:`write_json` wrote.

    Raises:
        ValueError: it is no JSON, of another format or version; or a field is missing, is unknown,
            is of another type or has a value that the dataclass refuses: names the field.
        OSError: it cannot be read.
    """
    try:
        return _made(made, Field(read_document(path, kind, version)))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Raises ValueError unless the value is finite and at least, or above, 0."""
    if not (0 < value < math.inf if positive else 0 <= value < math.inf):
        raise ValueError(f"{name}: {value}, it must be {'>' if positive else '>='} 0 and finite")


def _made(made: type[Made], field: Field) -> Made:
    hints = typing.get_type_hints(made)
    names = [each.name for each in dataclasses.fields(made)]  # type: ignore[arg-type]
    values = {
        name: _value(hints[name], item)
        for name, item in zip(names, field.fields(*names), strict=True)
    }
    try:
        return made(**values)
    except ValueError as error:
        raise ValueError(f"{field.where}.{error}" if field.where else str(error)) from None


def _value(hint: Any, field: Field) -> Any:
    """The field's value as one of the type."""
    if dataclasses.is_dataclass(hint):
        return _made(typing.cast("type[Any]", hint), field)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # of a tuple and of one type that is no list in JSON
        is_list = isinstance(field.value, list)
        matching = [each for each in arguments if is_list == (typing.get_origin(each) is tuple)]
        return _value(matching[0], field)
    if origin is tuple:
        length = None if arguments[-1] is ... else len(arguments)
        return field.each(lambda item: _value(arguments[0], item), length=length)
    if origin is dict:
        return {name: _value(arguments[1], item) for name, item in field.entries().items()}
    read = {str: Field.text, int: Field.whole, float: Field.number, bool: Field.flag}[hint]
    return read(field)
