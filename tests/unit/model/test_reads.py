"""What code reads beside its arguments, found in its bytecode."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from pipedream2bw.model.reads import Reads

LIMIT, UNREAD, COUNT = 1.0, 2.0, 0
SEEN: list[float] = []


def helper(x: Any) -> Any:
    return x * LIMIT


def counting(x: Any) -> Any:
    global COUNT
    COUNT += 1
    SEEN.append(x.last)
    return helper(x)


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x
        self.cache["x"] = x
        self.calls.add_(1)
        return self.inner(x) * getattr(self, "by_text")  # noqa: B009

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def not_called(self) -> Any:
        return self.unread


def variables(reads: Reads) -> set[str]:
    return {name for _, name in reads.bindings}


def test_a_module_reads_attributes_in_all_that_its_forward_calls() -> None:
    reads = Reads.of_class(Layer)
    assert {"factor", "by_text", "cache", "calls"} <= reads.names
    assert "unread" not in reads.names
    assert reads.assigned == {"kept"}
    assert {"cache", "calls"} <= reads.written
    assert "factor" not in reads.written


def test_globals_are_those_of_functions_that_are_called_and_do_not_set_them() -> None:
    reads = Reads.of([("f", counting)])
    assert {"LIMIT", "SEEN", "helper"} <= variables(reads)
    assert not {"UNREAD", "COUNT"} & variables(reads)
    assert "SEEN" in reads.written
    assert "last" in reads.names


def test_closures_partials_methods_and_objects_are_looked_into() -> None:
    beta, other = 1.0, 2.0

    class Holder:
        def __init__(self) -> None:
            self.weight = 3.0

        def __call__(self, x: Any) -> Any:
            return x * self.weight

    held = Holder()
    part = functools.partial(lambda scale, x: scale * held(x) * beta, 2.0)
    reads = Reads.of([("f", part)])
    assert variables(reads) == {"beta", "held"}
    assert ("f", other) not in reads.variables()
    assert "weight" in reads.names
    assert held in [value for _, value in Reads.of([("f", held.__call__)]).variables()]


def test_functions_of_torch_are_not_looked_into() -> None:
    assert not Reads.of([("f", nn.functional.mse_loss)]).bindings


def test_an_autograd_function_is_looked_into() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * LIMIT

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            SEEN.pop()
            return gradient

    reads = Reads.of([("f", lambda x: Scaled.apply(x))])
    assert {"LIMIT", "SEEN", "Scaled"} <= variables(reads)
    assert "SEEN" in reads.written
