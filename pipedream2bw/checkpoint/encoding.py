"""Users' state as JSON, its tensors apart: no pickle is written or read."""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .tensor_file import check_saveable

_MARK = "$"
"""Begins the one key of an object that stands for what JSON does not have."""


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value in JSON's types.

    Numbers, strings, None, lists, tuples, dictionaries and Counters, NumPy's arrays, and tensors,
    which are put into ``tensors``.

    Args:
        where: its name, which its tensors' names begin with.

    Raises:
        TypeError: anything else; names it.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
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
            return {key: encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        return {"$dict": _pairs(value, where, tensors)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {"$array": _put(torch.from_numpy(value.copy()), where, tensors)}
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), where, tensors)
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
        [encode(key, f"{where}.key{i}", tensors), encode(item, f"{where}.{key}", tensors)]
        for i, (key, item) in enumerate(value.items())
    ]


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which :func:`encode` made the document.

    Raises:
        ValueError, KeyError: it is none.
    """
    if isinstance(document, list):
        return [decode(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    kind = next(iter(document), "")
    if not kind.startswith(_MARK):
        return {key: decode(item, tensors) for key, item in document.items()}
    content = document[kind]
    if kind == "$float":
        return float(content)
    if kind == "$tensor":
        return tensors[content]
    if kind == "$array":
        return tensors[content].numpy()
    if kind == "$tuple":
        return tuple(decode(content, tensors))
    if kind in ("$dict", "$counter"):
        pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
        return pairs if kind == "$dict" else collections.Counter(pairs)
    raise ValueError(f"{kind}: no kind of value, known: $float, $tensor, $array, $tuple, $dict")
