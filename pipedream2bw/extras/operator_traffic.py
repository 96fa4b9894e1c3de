"""The bytes that operators move, by what they are of."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.costs import flops_of
from ..capture.device_figures import Work
from ..model.storages import storage_of
from ..model.trees import tensors_in

_NOTHING_READ = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_"}
"""Operators that overwrite their first argument."""

_PICKS_ROWS = {"embedding", "index_select", "gather", "index", "take"}
"""Operators that read no more of their first tensor than they give."""

_NOTHING_WRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclasses.dataclass
class Moved:
    """What operators have moved: bytes by kind, and the work of each."""

    bytes_of: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    work: list[Work] = dataclasses.field(default_factory=list)


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read and write, each tensor once per operator; there is no cache.

    Views move nothing. An element that an expanded tensor repeats counts once; of a table from
    which rows are picked only these count. An operator that writes in place reads what it changes,
    unless it overwrites all of it.

    Args:
        kind_of: the kind of a tensor, of those that ``Moved.bytes_of`` counts apart.
        made: is called with every tensor of a new memory.
    """

    def __init__(
        self,
        kind_of: Callable[[torch.Tensor], str],
        made: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind_of = kind_of
        self._made = made
        self.moved = Moved()

    def take(self) -> Moved:
        """What was counted since the last call."""
        moved, self.moved = self.moved, Moved()
        return moved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.namespace == "prim":
            return result
        name = func._schema.name.partition("::")[2]
        read, changed = _distinct((args, kwargs)), _written_arguments(func, args, kwargs)
        known = set(map(storage_of, read))
        new = [tensor for tensor in _distinct(result) if storage_of(tensor) not in known]
        for tensor in new:
            self._made(tensor)
        if not new and not changed:  # a view, whatever the operator is called
            return result
        first = read[0] if read else None
        picked = new[0] if name in _PICKS_ROWS and new else None
        if name in _NOTHING_READ:
            read = read[1:]
        written = [] if name in _NOTHING_WRITTEN else [*changed, *new]
        flops = flops_of(func, args, kwargs, result)
        total = 0
        for tensor in (*read, *written):
            size = element_bytes(picked if tensor is first and picked is not None else tensor)
            self.moved.bytes_of[self._kind_of(tensor)] += size
            total += size
        if total or flops:
            dtype = first.dtype if flops and first is not None else torch.float32
            self.moved.work.append(Work(flops, dtype, total))
        return result


def element_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements, those that it repeats once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= min(size, 1) if stride == 0 else size
    return int(count)


def _distinct(tree: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_in(tree)}.values())


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if not func._schema.is_mutable:
        return []
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return _distinct(
        [
            given.get(argument.name)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )
