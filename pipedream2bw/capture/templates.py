"""The values of an example call, by which those of later calls are compared and taken apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
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


@dataclasses.dataclass(frozen=True)
class _Constant:
    path: str
    value: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Container:
    path: str
    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    spec: pytree.TreeSpec


def template_of(value: Any, path: str, keys: tuple[str, ...], tensors: list[TensorLeaf]) -> Any:
    """What :func:`collect` takes a later call's value apart by; adds to ``tensors`` this one's."""
    if isinstance(value, torch.Tensor):
        leaf = TensorLeaf(path, _identifier(path), keys, value)
        tensors.append(leaf)
        return leaf
    children, spec = _open(value)
    if spec is None:
        return _Constant(path, value)
    templates = tuple(
        template_of(child, f"{path}[{key!r}]", (*keys, str(key)), tensors)
        for key, child in children
    )
    return _Container(
        path=path,
        kind=type(value),
        keys=tuple(key for key, _ in children),
        children=templates,
        spec=spec,
    )


def _open(value: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec | None]:
    """Returns the (key, child) pairs of a container and its own spec; a leaf has no spec."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if len(children) == 1 and children[0] is value:
        return [], None
    keys = list(value) if isinstance(value, dict) else list(range(len(children)))
    return list(zip(keys, children, strict=True)), spec


def collect(template: Any, value: Any, values: list[torch.Tensor]) -> None:
    """Adds the tensors of a call's value to ``values``; see :meth:`CallSignature.tensors_of`."""
    if isinstance(template, TensorLeaf):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"argument {template.path}: {type(value).__name__} given, "
                "a tensor in the example call. Give a tensor"
            )
        values.append(value)
    elif isinstance(template, _Constant):
        if not _same_constant(value, template.value):
            raise ValueError(
                f"argument {template.path}: {_short(value)} given, "
                f"{_short(template.value)} in the example call: values that are no tensors are "
                "part of the captured model"
            )
    else:
        _collect_container(template, value, values)


def _collect_container(template: _Container, value: Any, values: list[torch.Tensor]) -> None:
    if type(value) is not template.kind:
        raise ValueError(
            f"argument {template.path}: {type(value).__name__} given, "
            f"{template.kind.__name__} in the example call"
        )
    pairs, spec = _open(value)
    given = dict(pairs)
    if isinstance(value, dict) and given.keys() != set(template.keys):
        raise ValueError(
            f"argument {template.path}: keys {listing(value)} given, "
            f"{listing(template.keys)} in the example call"
        )
    if len(given) != len(template.children):
        raise ValueError(
            f"argument {template.path}: {len(given)} elements given, "
            f"{len(template.children)} in the example call"
        )
    if not isinstance(value, (dict, list, tuple)) and spec != template.spec:
        raise ValueError(
            f"argument {template.path}: structure {spec} given, {template.spec} in the example call"
        )
    for key, child in zip(template.keys, template.children, strict=True):
        collect(child, given[key], values)


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
