"""Decides which layers are timed together, and which of these groups do the same.

One operator often takes less time than reading the clock and calling it, so layers are timed in
groups. A group ends where a stage would: where few bytes cross, which in a transformer is after
every attention and every MLP. How a group's time is divided among its layers is a guess, so no
stage may end inside a group: then every stage's predicted time is a sum of measured ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from ...capture.attribute import Attribute
from ...capture.captured import Captured
from ...stages.boundaries import bonds_of

# A group takes at least so many nominal seconds, or such a part of the model's.
_LEAST_SECONDS = 200e-6
_LEAST_PART = 1 / 32

# A larger one is divided even where many bytes cross, so that stages can take equally long.
_MOST_PART = 1 / 16

# Settings of modules that are equal if their texts are.
_PLAIN = (bool, int, float, str, tuple, torch.dtype, torch.device, type(None))


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers first..end-1 of a capture.

    Attributes:
        like: the index of the first group that does the same as this one, perhaps its own.
    """

    first: int
    end: int
    like: int

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


def group_layers(captured: Captured, root: nn.Module, seconds: Sequence[float]) -> list[Group]:
    """Divides a capture whose last layer is the loss, which stays with the layer before.

    Args:
        seconds: nominal seconds of each layer, which are the same on every machine.
    """
    boundaries = [*_boundaries(captured, seconds), len(captured.layers)]
    known: dict[Hashable, int] = {}
    groups = []
    for index, (first, end) in enumerate(itertools.pairwise(boundaries)):
        like = known.setdefault(_Kind(captured, root, first, end).key, index)
        groups.append(Group(first, end, like))
    return groups


def crossing_bytes(captured: Captured) -> list[int]:
    """Bytes that cross the cut before each layer; 0 before the first."""
    index_of = {node: index for index, node in enumerate(captured.layer_nodes)}
    last_use: dict[fx.Node, int] = {}
    for consumer, node in enumerate(captured.layer_nodes):
        for value in node.all_input_nodes:
            if value in index_of:
                last_use[value] = consumer
    changes = [0] * (len(captured.layer_nodes) + 1)
    for value, consumer in last_use.items():
        size = captured.costs.value_bytes.get(value.name, 0)
        changes[index_of[value] + 1] += size
        changes[consumer + 1] -= size
    return list(itertools.accumulate(changes))[:-1]


def _boundaries(captured: Captured, seconds: Sequence[float]) -> list[int]:
    n = len(captured.layers)
    bonds = bonds_of(captured)
    allowed = [cut for cut in range(1, n - 1) if bonds.allow(cut)]
    crossing = crossing_bytes(captured)
    until = list(itertools.accumulate(seconds, initial=0.0))
    least = min(_LEAST_SECONDS, until[n] * _LEAST_PART)
    chosen = [0]
    for cut in _valleys(allowed, crossing):
        if until[cut] - until[chosen[-1]] >= least:
            chosen.append(cut)
    if len(chosen) > 1 and until[n] - until[chosen[-1]] < least:
        chosen.pop()
    most = until[n] * _MOST_PART
    parted: list[int] = []
    for first, end in itertools.pairwise([*chosen, n]):
        parted.append(first)
        inside = [cut for cut in allowed if first < cut < end]
        parted.extend(_parted(first, end, inside, crossing, until, most))
    return parted


def _valleys(allowed: Sequence[int], crossing: Sequence[int]) -> Iterator[int]:
    """Cuts that fewer bytes cross than the cuts before and after."""
    runs = [list(run) for _, run in itertools.groupby(allowed, crossing.__getitem__)]
    for index, run in enumerate(runs):
        neighbours = [*runs[max(index - 1, 0) : index], *runs[index + 1 : index + 2]]
        if all(crossing[other[0]] > crossing[run[0]] for other in neighbours):
            yield from run


def _parted(
    first: int,
    end: int,
    allowed: Sequence[int],
    crossing: Sequence[int],
    until: Sequence[float],
    most: float,
) -> Iterator[int]:
    """Cuts that divide layers first..end-1 into groups of about ``most`` seconds or less."""
    while until[end] - until[first] > most:
        after = [cut for cut in allowed if cut > first]
        fitting = [cut for cut in after if most / 4 <= until[cut] - until[first] <= most]
        too_long = [cut for cut in after if until[cut] - until[first] > most]
        if not fitting and not too_long:
            return
        first = min(fitting, key=lambda cut: (crossing[cut], -cut)) if fitting else too_long[0]
        yield first


class _Kind:
    """A description of what a group computes; groups with equal keys take equally long."""

    def __init__(self, captured: Captured, root: nn.Module, first: int, end: int) -> None:
        self._captured = captured
        self._root = root
        nodes = captured.layer_nodes[first:end]
        inside = set(nodes)
        self._numbers: dict[Any, int] = {}
        self.key: Hashable = tuple(
            (
                node.op,
                self._target(node),
                repr(map_arg((node.args, node.kwargs), self._operand)),
                self._described(node),
                any(user not in inside for user in node.users),
                self._number(node),
            )
            for node in nodes
        )

    def _number(self, item: Any) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def _described(self, node: fx.Node) -> str:
        return self._captured.costs.described.get(node.name, "unknown")

    def _target(self, node: fx.Node) -> Hashable:
        if node.op == "call_module":
            return self._attribute(node)
        return node.target

    def _operand(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        return "value", self._number(node), self._described(node)

    def _attribute(self, node: fx.Node) -> Hashable:
        attribute: Attribute = self._captured.attribute_of(node)
        # The number shows where a parameter is used twice.
        number = self._number((attribute.kind, attribute.target))
        if attribute.kind == "constant":
            return ("constant", number, id(attribute.value))
        if attribute.kind == "module":
            return ("module", number, _describe_module(self._root.get_submodule(attribute.target)))
        owner, _, name = attribute.target.rpartition(".")
        tensor = getattr(self._root.get_submodule(owner), name)
        return (attribute.kind, number, _describe_tensor(tensor))


def _describe_module(module: nn.Module) -> str:
    return "\n".join(
        " ".join(
            [
                f"{name} {type(item).__module__}.{type(item).__qualname__}({item.extra_repr()})",
                *_settings(item),
                *map(_describe_tensor, item.parameters(recurse=False)),
                *map(_describe_tensor, item.buffers(recurse=False)),
            ]
        )
        for name, item in module.named_modules()
    )


def _settings(module: nn.Module) -> Iterable[str]:
    for name, value in sorted(vars(module).items()):
        if "_hooks" in name and value:
            yield f"hooks of {id(module)}"
        elif isinstance(value, _PLAIN):
            yield f"{name}={value!r}"
        elif not name.startswith("_") and name != "training":
            yield f"{name}={_what(value)}"


def _what(value: Any) -> str:
    """Describes an attribute: a function by its name, another object by its identity."""
    return getattr(value, "__qualname__", None) or f"{type(value).__name__} at {id(value)}"


def _describe_tensor(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{list(tensor.shape)} {list(tensor.stride())} {tensor.dtype} {tensor.requires_grad}"
