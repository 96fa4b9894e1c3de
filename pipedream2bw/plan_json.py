"""Dataclasses as JSON, with every field checked when they are read back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from .json_fields import Field, read_document

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
