"""The arguments of a graph of ``torch.compile``: weights, rows, and numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from . import CALLED

_STATE_SOURCE = "UnspecializedParamBufferSource"
"""How torch.compile says that a graph's argument is a module's parameter or buffer."""


class Inputs:
    """Which of a graph's arguments are what.

    Attributes:
        placeholders: the graph's, in order.
        state: positions of parameters and buffers.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        self.state = frozenset(i for i, n in enumerate(self.placeholders) if _is_state(n))
        tensors = [
            i
            for i, node in enumerate(self.placeholders)
            if i not in self.state and isinstance(node.meta.get("example_value"), torch.Tensor)
        ]
        self._first = next(
            (i for i in tensors if self.placeholders[i].meta["example_value"].dim() > 0), None
        )
        rows = None if self._first is None else _rows(self.placeholders[self._first])
        self._split = [
            i
            for i in tensors
            if self.placeholders[i].meta["example_value"].dim() > 0
            and _same(_rows(self.placeholders[i]), rows)
        ]
        self._numbers_of_rows = [
            i
            for i, node in enumerate(self.placeholders)
            if isinstance(node.meta.get("example_value"), torch.SymInt)
            and _same(node.meta["example_value"], rows)
        ]

    def microbatches(self, args: Sequence[Any], count: int) -> list[list[Any]]:
        """The arguments of each microbatch, at most one for each row."""
        if self._first is None:
            return [list(args)]
        rows = args[self._first].shape[0]
        count = min(count, rows)
        if count <= 1:
            return [list(args)]
        parts = [list(args) for _ in range(count)]
        for position in self._split:
            for part, values in zip(parts, args[position].tensor_split(count), strict=True):
                part[position] = values
        for part in parts:
            for position in self._numbers_of_rows:
                part[position] = part[self._first].shape[0]
        return parts

    def have_unlike_rows(self, args: Sequence[Any]) -> bool:
        """Whether an argument's rows differ: of equal ones a mean over all is that over some."""
        return any((args[i] != args[i][:1]).any() for i in self._split)

    def form(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Shapes and dtypes of all but the state, and values of numbers."""
        return tuple(
            (item.shape, item.dtype) if isinstance(item, torch.Tensor) else item
            for i, item in enumerate(args)
            if i not in self.state
        )

    def copied(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with copies of tensors but parameters, which a graph may write to."""
        return [
            item.clone()
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)
            else item
            for item in args
        ]

    def refuse_written(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Raises ValueError if an argument is not as it was."""
        for node, old, new in zip(self.placeholders, before, after, strict=True):
            if old is new or not isinstance(old, torch.Tensor):
                continue
            if not torch.allclose(old, new, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"{CALLED}: the graph writes to {node.target}: "
                    "each microbatch would; call model.eval(), or leave out the backend"
                )


def _is_state(node: fx.Node) -> bool:
    if isinstance(node.meta.get("example_value"), nn.Parameter):
        return True
    source = getattr(node.meta.get("grapharg"), "source", None)
    while source is not None:
        if type(source).__name__ == _STATE_SOURCE:
            return True
        source = getattr(source, "base", None)
    return False


def _rows(node: fx.Node) -> Any:
    return node.meta["example_value"].shape[0]


def _same(one: Any, other: Any) -> bool:
    """Whether two sizes are the same: the same symbol, or the same number."""
    symbols = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other)]
    return bool(symbols[0] == symbols[1])
