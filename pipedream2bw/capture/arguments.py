"""The signature of a call of the model: which tensors are in it, and where.

The example call fixes the structure: which parameters of ``forward`` are given, how containers
nest, and every leaf that is no tensor (numbers, strings, None, flags). These leaves are part of the
captured program, so a later call must repeat them; the tensors are the model's inputs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
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


class CallSignature:
    """The structure of the example call, by which other calls are taken apart and rebuilt.

    Attributes:
        args, kwargs: the example call.
        tensors: its tensors, in the order in which they stand in it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any],
    ) -> None:
        """Reads the structure of ``forward(*example_args, **example_kwargs)``.

        Raises:
            ValueError: the signature of ``forward`` does not take these arguments.
        """
        self._forward = _signature_of(forward)
        try:
            bound = self._forward.bind(*example_args, **example_kwargs)
        except TypeError as error:
            raise ValueError(
                f"example_args and example_kwargs do not fit the model's "
                f"forward{self._forward}: {error}"
            ) from None
        self.args, self.kwargs = bound.args, bound.kwargs
        self._names = self._names_of(len(self.args), tuple(self.kwargs))
        self.tensors: list[TensorLeaf] = []
        self._templates = [
            self._template(value, name, (name,))
            for name, value in zip(self._names, [*self.args, *self.kwargs.values()], strict=True)
        ]
        self._all_tensors = all(isinstance(item, TensorLeaf) for item in self._templates)
        # A call may pass by keyword what the example passed by position, and vice versa: where each
        # argument is found depends on the number of positional arguments and the names of others.
        self._sources: dict[tuple[int, tuple[str, ...]], list[int | str]] = {}

    def tensors_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors of a call, in the order of :attr:`tensors`.

        Raises:
            ValueError: other arguments are given than in the example call, a container has
                another structure, or a value that is no tensor differs; states both.
            TypeError: something else than a tensor is given where the example had one.
        """
        form = (len(args), tuple(kwargs))
        sources = self._sources.get(form)
        if sources is None:
            sources = self._sources[form] = self._find_sources(*form)
        given = [args[key] if type(key) is int else kwargs[key] for key in sources]  # type: ignore[index]
        if self._all_tensors and all(isinstance(value, torch.Tensor) for value in given):
            return given
        values: list[torch.Tensor] = []
        for template, value in zip(self._templates, given, strict=True):
            _collect(template, value, values)
        return values

    def rebuild(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the example call's args and kwargs with ``values`` in place of its tensors."""
        remaining = iter(values)
        example = [*self.args, *self.kwargs.values()]
        built = pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), example)
        return tuple(built[: len(self.args)]), dict(
            zip(self.kwargs, built[len(self.args) :], strict=True)
        )

    def _find_sources(self, num_args: int, kwarg_names: tuple[str, ...]) -> list[int | str]:
        try:
            bound = self._forward.bind(*range(num_args), **{name: name for name in kwarg_names})
        except TypeError as error:
            raise ValueError(
                f"the arguments do not fit the model's forward{self._forward}: {error}"
            ) from None
        sources = dict(
            zip(
                self._names_of(len(bound.args), tuple(bound.kwargs)),
                [*bound.args, *bound.kwargs.values()],
                strict=True,
            )
        )
        if sources.keys() != set(self._names):
            raise ValueError(
                f"arguments given: {_listing(sources)}, in the example call: "
                f"{_listing(self._names)}: the model was captured for exactly the arguments of "
                "example_args and example_kwargs"
            )
        return [sources[name] for name in self._names]

    def _names_of(self, num_args: int, kwarg_names: tuple[str, ...]) -> tuple[str, ...]:
        names: list[str] = []
        for parameter in self._forward.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind == parameter.VAR_POSITIONAL:
                names.extend(f"{parameter.name}[{i}]" for i in range(num_args - len(names)))
        return (*names[:num_args], *kwarg_names)

    def _template(self, value: Any, path: str, keys: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            leaf = TensorLeaf(path, _identifier(path), keys, value)
            self.tensors.append(leaf)
            return leaf
        children, spec = _open(value)
        if spec is None:
            return _Constant(path, value)
        templates = tuple(
            self._template(child, f"{path}[{key!r}]", (*keys, str(key))) for key, child in children
        )
        return _Container(
            path=path,
            kind=type(value),
            keys=tuple(key for key, _ in children),
            children=templates,
            spec=spec,
        )


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


def _open(value: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec | None]:
    """Returns the (key, child) pairs of a container and its own spec; a leaf has no spec."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if len(children) == 1 and children[0] is value:
        return [], None
    keys = list(value) if isinstance(value, dict) else list(range(len(children)))
    return list(zip(keys, children, strict=True)), spec


def _collect(template: Any, value: Any, values: list[torch.Tensor]) -> None:
    if isinstance(template, TensorLeaf):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"argument {template.path}: {type(value).__name__} given, "
                "a tensor in the example call"
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
            f"argument {template.path}: keys {_listing(value)} given, "
            f"{_listing(template.keys)} in the example call"
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
        _collect(child, given[key], values)


def _same_constant(given: Any, example: Any) -> bool:
    if given is example:
        return True
    if isinstance(given, torch.Tensor) or type(given) is not type(example):
        return False
    try:
        return bool(given == example)
    except Exception:  # the comparison gives neither yes nor no
        return False


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # implemented in C: any arguments may be right
        kinds = inspect.Parameter
        return inspect.Signature(
            [kinds("args", kinds.VAR_POSITIONAL), kinds("kwargs", kinds.VAR_KEYWORD)]
        )
    # Annotations make error messages unreadable.
    return signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )


def _identifier(path: str) -> str:
    text = "".join(char if char.isalnum() or char == "_" else "_" for char in path)
    return "_".join(part for part in text.split("_") if part) or "x"


def _listing(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _short(value: Any, limit: int = 80) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
