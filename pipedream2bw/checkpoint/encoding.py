"""Users' state as JSON, its tensors apart: no pickle is written or read."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..json_document import MOST_LEVELS, Field, check_nesting
from .tensor_file import check_saveable

_KINDS = ("$float", "$tensor", "$array", "$tuple", "$dict", "$counter")
_MARK = "$"
"""Begins the one key of an object that stands for what JSON does not have."""


_LEVELS_ABOVE = 8
"""Lists and objects, at most, in which a manifest has such a document."""


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value in JSON's types.

    Numbers, strings, None, lists, tuples, dictionaries and Counters, NumPy's arrays, and tensors,
    which are put into ``tensors``.

    Args:
        where: its name, which its tensors' names begin with.

    Raises:
        TypeError: anything else; names it.
        ValueError: it lies in too many lists and dictionaries to be read again, or is a whole
            number of too many digits.
    """
    try:
        document = _encode(value, where, tensors)
        check_nesting(document, MOST_LEVELS - _LEVELS_ABOVE)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    return document


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        try:
            str(value)
        except ValueError as error:  # Python's limit, 4300 digits
            raise ValueError(f"{where}: {error}") from None
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.Tensor):
        check_saveable(where, value)
        return {"$tensor": _put(value, where, tensors)}
    if isinstance(value, collections.Counter):
        return {"$counter": _pairs(value, where, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: _encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        return {"$dict": _pairs(value, where, tensors)}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        try:
            tensor = torch.from_numpy(value.copy())
        except (TypeError, ValueError) as error:  # torch has no such dtype, or byte order
            raise TypeError(f"{where}: an array of {value.dtype} given: {error}") from None
        return {"$array": _put(tensor, where, tensors)}
    if numpy is not None and isinstance(value, numpy.generic):
        return _encode(value.item(), where, tensors)
    raise TypeError(
        f"{where}: {type(value).__module__}.{type(value).__qualname__} given, checkpoints hold "
        "tensors, numbers, strings, None, lists, tuples and dictionaries"
    )


def _put(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    name, number = where, 1
    while name in tensors:  # {"a": {"b": ...}, "a.b": ...}
        number += 1
        name = f"{where}#{number}"
    tensors[name] = tensor
    return name


def _pairs(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [
        [_encode(key, f"{where}.key{i}", tensors), _encode(item, f"{where}.{key}", tensors)]
        for i, (key, item) in enumerate(value.items())
    ]


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which :func:`encode` made the document; ValueError if it made none such."""
    if isinstance(document, list):
        return [decode(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    kind = next((key for key in document if key.startswith(_MARK)), None)
    if kind is None:
        return {key: decode(item, tensors) for key, item in document.items()}
    field = Field(document).fields(kind)[0]
    try:
        if kind == "$float":
            return float(field.read_as(str))
        if kind in ("$tensor", "$array"):
            name = field.read_as(str)
            if name not in tensors:
                field.fail("the name of a tensor that was saved with it")
            return tensors[name] if kind == "$tensor" else tensors[name].numpy()
        if kind == "$tuple":
            return tuple(decode(item.value, tensors) for item in field.items())
        if kind in ("$dict", "$counter"):
            items = [item.items(2) for item in field.items()]
            found = dict([decode(each.value, tensors) for each in item] for item in items)
            if len(found) < len(items):
                field.fail("a list of pairs with different keys")
            return collections.Counter(found) if kind == "$counter" else found
    except (TypeError, ValueError) as error:  # NumPy has no such dtype; a key that is a list
        raise ValueError(f"{field.where}: {error}") from None
    raise ValueError(f"{kind}: no kind of value, known: {', '.join(_KINDS)}")
