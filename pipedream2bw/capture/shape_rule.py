"""Which shapes of arguments an exported program is valid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ShapeRule:
    """The sizes that torch.export has fixed, and what must hold for those that it has left open.

    Args:
        values: for each tensor of a call, what stands for it in the exported program.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._sizes = [[_expression(size) for size in value.shape] for value in values]
        self._conditions: list[Any] = []
        symbolic: list[Any] = [
            size for value in values for size in value.shape if not isinstance(size, int)
        ]
        if symbolic:
            environment = symbolic[0].node.shape_env
            conditions = [
                guard.expr.xreplace(environment.replacements)
                for guard in environment.guards
                if not _chooses_a_library(guard)
            ]
            # Numbers of rows come in all sizes. That they are not by chance as large as something
            # else is what torch.export takes for granted, and nothing that the program needs.
            rows = {
                symbol
                for sizes in self._sizes
                if sizes and not isinstance(sizes[0], int)
                for symbol in sizes[0].free_symbols
            }
            self._conditions = [
                condition
                for condition in conditions
                if not (isinstance(condition, _sympy().Ne) and condition.free_symbols <= rows)
            ]

    def why_not(self, given: Mapping[int, tuple[str, Sequence[int]]]) -> str | None:
        """Why the program must not be run on tensors of these shapes; None: it may be.

        Args:
            given: by a tensor's position in a call, what messages call it, and its shape.
        """
        sizes: dict[Any, int] = {}
        computed: list[tuple[str, Any, int]] = []
        for position, (path, shape) in given.items():
            expected = self._sizes[position]
            if len(shape) != len(expected):
                return f"argument {path}: {len(shape)} dimensions, when captured: {len(expected)}"
            for dimension, (size, mine) in enumerate(zip(expected, shape, strict=True)):
                place = f"argument {path}: {mine} in dimension {dimension}"
                if isinstance(size, int):
                    if size != mine:
                        return f"{place}, when captured: {size}"
                elif not size.is_Symbol:
                    computed.append((place, size, mine))
                elif sizes.setdefault(size, mine) != mine:
                    return f"{place}, another one that must be equal: {sizes[size]}"
        for place, size, mine in computed:
            if size.xreplace(_numbers(sizes)) != mine:
                return f"{place}, it must be {size.xreplace(_numbers(sizes))}"
        # torch.export takes a size of 1 for a constant, and an open one for at least 2: what it has
        # decided for those a size of 1 obeys, too.
        larger = {symbol: max(size, 2) for symbol, size in sizes.items()}
        for condition in self._conditions:
            if condition.xreplace(_numbers(larger)) == _sympy().false:
                shapes = [list(shape) for _, shape in given.values()]
                return f"shapes {shapes} of the arguments: valid only if {condition}"
        return None


def _chooses_a_library(guard: Any) -> bool:
    """Whether a fake convolution asked by which library a real one of its size is computed.

    It wants to know the strides of the result, for which the program does not care.
    """
    from torch._subclasses import fake_impls  # where there are guards it is imported

    asked, convolution = guard.sloc.framework_loc, fake_impls.conv.__code__
    return (getattr(asked, "filename", ""), getattr(asked, "name", "")) == (
        convolution.co_filename,
        convolution.co_name,
    )


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _numbers(sizes: dict[Any, int]) -> dict[Any, Any]:
    return {symbol: _sympy().Integer(size) for symbol, size in sizes.items()}


def _sympy() -> Any:
    """Imports sympy, which takes longer than this package, where a model has open sizes."""
    import sympy  # type: ignore[import-untyped]

    return sympy
