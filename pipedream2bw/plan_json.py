"""Dataclasses as JSON, with every field checked when they are read back."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def write_json(value: Any, path: Path, *, format: str, version: int) -> None:
    """Writes a dataclass's fields, below the format's name and version."""
    fields = {"format": format, "version": version, **dataclasses.asdict(value)}
    path.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(kind: type[Made], path: Path, *, format: str, version: int) -> Made:
    """A dataclass from what :func:`write_json` wrote.

    Raises:
        ValueError: this is no JSON object of that format and version; or a field is missing, is
            unknown or has a value of another type: names it and says both.
        OSError: the file cannot be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON and UTF-8
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: {_short(fields)} given, it must be an object with fields")
    for name, expected in {"format": format, "version": version}.items():
        if name not in fields:
            raise ValueError(f"{path}: {name}: missing, it must be {expected!r}")
        found = fields.pop(name)
        if type(found) is not type(expected) or found != expected:
            raise ValueError(f"{path}: {name}: {_short(found)} given, it must be {expected!r}")
    try:
        return _made(kind, fields, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Raises ValueError unless the value is finite and at least, or above, 0."""
    if not (0 < value < math.inf if positive else 0 <= value < math.inf):
        raise ValueError(f"{name}: {value}, it must be {'>' if positive else '>='} 0 and finite")


def _made(kind: type[Made], given: Any, where: str) -> Made:
    if not isinstance(given, dict):
        raise ValueError(f"{where}: {_short(given)} given, it must be an object with fields")
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    expected = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in expected:
            raise ValueError(f"{prefix}{name}: unknown, the fields are {', '.join(expected)}")
    for name in expected:
        if name not in given:
            raise ValueError(f"{prefix}{name}: missing, it must be {_described(hints[name])}")
    values = {name: _value(hints[name], given[name], prefix + name) for name in expected}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _value(hint: Any, given: Any, where: str) -> Any:
    """What the JSON value is as a value of the type.

    Raises:
        ValueError: it is none.
    """
    if dataclasses.is_dataclass(hint):
        return _made(typing.cast("type[Any]", hint), given, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        for each in arguments:
            if isinstance(given, (typing.get_origin(each) or each, list)) and (
                isinstance(given, list) == (typing.get_origin(each) is tuple)
            ):
                return _value(each, given, where)
    elif origin is tuple and isinstance(given, list):
        if arguments[-1] is ...:
            arguments = arguments[:1] * len(given)
        if len(arguments) == len(given):
            pairs = enumerate(zip(arguments, given, strict=True))
            return tuple(_value(each, item, f"{where}[{i}]") for i, (each, item) in pairs)
    elif origin is dict and isinstance(given, dict):
        return {key: _value(arguments[1], item, f"{where}[{key}]") for key, item in given.items()}
    elif hint is float and isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(given):
            return float(given)
    elif isinstance(hint, type) and type(given) is hint:
        return given
    raise ValueError(f"{where}: {_short(given)} given, it must be {_described(hint)}")


def _described(hint: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}
    if hint in names:
        return names[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " or ".join(_described(each) for each in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"a list of {count}{_described(arguments[0]).removeprefix('a ')}s"
    if origin is dict:
        return f"an object of {_described(arguments[1]).removeprefix('a ')}s"
    return "an object with fields"


def _short(value: Any, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
