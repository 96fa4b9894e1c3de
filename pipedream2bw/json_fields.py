"""Reading JSON whose every field is checked: errors name the field and what it holds."""

from __future__ import annotations

import json
import math
import os
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
