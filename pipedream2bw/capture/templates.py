"""The values of an example call, by which those of later calls are compared and taken apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class TensorLeaf:
    """One tensor of the example call."""

    path: str  # as in error messages: "x", "batch['mask']"
    name: str  # a Python identifier made from the path
    keys: tuple[str, ...]  # every name on the path: parameter of forward, then dictionary keys
    example: torch.Tensor

    def carries_batch(self, replicated: Collection[str]) -> bool:
        """Tells whether dimension 0 is the batch's rows."""
        return not any(key in replicated for key in self.keys)


def leaves_of(value: Any, path: str, keys: tuple[str, ...]) -> Iterator[TensorLeaf]:
    """The tensors of an argument of the example call."""
    if isinstance(value, torch.Tensor):
        yield TensorLeaf(path, _identifier(path), keys, value)
        return
    children, _ = _open(value)
    for key, child in children:
        yield from leaves_of(child, f"{path}[{key!r}]", (*keys, str(key)))


def _open(value: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec | None]:
    """Returns the (key, child) pairs of a container and its own spec; a leaf has no spec."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if len(children) == 1 and children[0] is value:
        return [], None
    keys = list(value) if isinstance(value, dict) else list(range(len(children)))
    return list(zip(keys, children, strict=True)), spec


def collect(example: Any, value: Any, path: str, values: list[torch.Tensor]) -> None:
    """Adds the tensors of a call's value to ``values``; see :meth:`CallSignature.tensors_of`."""
    if isinstance(example, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"argument {path}: {type(value).__name__} given, "
                "a tensor in the example call. Give a tensor"
            )
        values.append(value)
        return
    children, spec = _open(example)
    if spec is None:
        if not _same_constant(value, example):
            raise ValueError(
                f"argument {path}: {_short(value)} given, {_short(example)} in the example call: "
                "values that are no tensors are part of the captured model"
            )
        return
    if type(value) is not type(example):
        raise ValueError(
            f"argument {path}: {type(value).__name__} given, "
            f"{type(example).__name__} in the example call"
        )
    pairs, its_spec = _open(value)
    given = dict(pairs)
    if isinstance(value, dict) and given.keys() != example.keys():
        raise ValueError(
            f"argument {path}: keys {listing(value)} given, {listing(example)} in the example call"
        )
    if len(given) != len(children):
        raise ValueError(
            f"argument {path}: {len(given)} elements given, {len(children)} in the example call"
        )
    if not isinstance(value, (dict, list, tuple)) and its_spec != spec:
        raise ValueError(f"argument {path}: structure {its_spec} given, {spec} in the example call")
    for key, child in children:
        collect(child, given[key], f"{path}[{key!r}]", values)


def _same_constant(given: Any, example: Any) -> bool:
    if given is example:
        return True
    if isinstance(given, torch.Tensor) or type(given) is not type(example):
        return False
    try:
        return bool(given == example)
    except Exception:  # the comparison gives neither yes nor no
        return False


def _identifier(path: str) -> str:
    text = "".join(char if char.isalnum() or char == "_" else "_" for char in path)
    return "_".join(part for part in text.split("_") if part) or "x"


def listing(names: Any) -> str:
    """Shows names in an error's text."""
    return ", ".join(sorted(map(str, names))) or "none"


def _short(value: Any, limit: int = 80) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
