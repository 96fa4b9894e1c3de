"""A forward that writes to parameters is refused when the pipeline is made, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipedream2bw as pd2
from pipedream2bw.capture.capture import capture

X = torch.randn(6, 8)


def assigned(layer: nn.Linear) -> None:
    layer.weight.data = functional.normalize(layer.weight.data)


def halved(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


def copied(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(functional.normalize(layer.weight))


def by_data(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-1, 1)


def detached(layer: nn.Linear) -> None:
    layer.weight.detach()[0] *= 0.5


def by_out(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.mul(layer.weight, 2.0, out=layer.weight)


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


WRITES = [assigned, halved, copied, by_data, detached, by_out, replaced]


class Writes(nn.Module):
    def __init__(self, write: Callable[[nn.Linear], None], *, reads: bool = False) -> None:
        super().__init__()
        self.write, self.reads = write, reads
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:  # which fake tensors cannot
            x = x * float(x.detach().sum().item() * 0 + 1)
        self.write(self.linear)
        return self.linear(x)


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def chained(inner: nn.Module) -> Any:
    return [nn.Linear(8, 8), inner]


@pytest.mark.parametrize("around", [lambda inner: inner, Inside, chained, nn.Sequential])
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_refused_wherever_they_are(write: Any, around: Any) -> None:
    with pytest.raises(ValueError, match=r"^parameter (inner\.|0\.|1\.|)linear\.weight: .*writes"):
        capture(around(Writes(write)), num_stages=1, example_args=(X,))


@pytest.mark.parametrize("around", [Inside, chained])
@pytest.mark.parametrize("write", [assigned, copied, by_data])
def test_writes_beside_what_fake_tensors_cannot_compute(write: Any, around: Any) -> None:
    with pytest.raises(ValueError, match=r"^parameter (inner|1)\.linear\.weight: .*writes"):
        capture(around(Writes(write, reads=True)), num_stages=1, example_args=(X,))


@pytest.mark.parametrize("write", WRITES)
def test_writes_in_a_root_that_torch_fx_cannot_trace(write: Any) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            write(self.linear)
            assert isinstance(x.shape[1], int)
            return self.last(self.linear(x))

    with pytest.raises(ValueError, match=r"parameter linear\.weight: .*writes"):
        capture(Root(), num_stages=2, example_args=(X,))


def test_a_table_whose_rows_are_renormed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 8)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(words))

    words = torch.randint(0, 9, (6, 3))
    with pytest.raises(ValueError, match=r"^parameter table\.weight: .*optimizer"):
        capture(Words(), num_stages=2, example_args=(words,))


def test_frozen_parameters_too() -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            for target, online in zip(
                self.target.parameters(), self.online.parameters(), strict=True
            ):
                target.data = 0.9 * target.data + 0.1 * online.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.follow()
            return self.online(x) - self.target(x)

    with pytest.raises(ValueError, match=r"^parameter 1\.target\.(weight|bias): .*a buffer"):
        capture(chained(Averages()), num_stages=2, example_args=(X,))


def test_a_write_in_evaluation_alone_is_refused_there() -> None:
    class Clamps(Writes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.write(self.linear)
            return self.linear(x)

    with pd2.PipelineModule(
        chained(Clamps(by_data)),
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(X,),
    ) as pipe:
        pipe.eval()
        with pytest.raises(ValueError, match=r"parameter 1\.linear\.weight: .*writes"):
            pipe(X)


def test_parametrized_weights_are_no_writes() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    old = nn.utils.spectral_norm(nn.Linear(8, 8))
    capture(nn.Sequential(layer, old), num_stages=2, example_args=(X,))
