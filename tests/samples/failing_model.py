"""A model whose code fails where it is told to: in a layer, a hook, a backward, the loss, a metric.

Every row carries a tag beside its values through all layers, which says of which batch and
microbatch it is. So a failure is aimed at one action, whatever else has failed before.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, mse_loss

from tests.references.oracle import Batch

WIDTH = 4
ROWS = 3
"""Of a microbatch."""

_TAGS = 1 << 10  # more than rows in a batch

KINDS = (
    "forward",
    "module hook",
    "second forward",  # recomputes
    "backward",
    "hook",
    "weight gradient",
    "loss",
    "wrong loss",
    "metric",
    "width",
    "dtype",
    "evaluation",
)
OF_INPUT = ("width", "dtype")
OF_BACKWARD = ("second forward", "backward", "hook", "weight gradient")
OF_LAST_STAGE = ("loss", "wrong loss", "metric")


class OwnError(Exception):
    """Of the user's; no process can send it to another."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


RAISED: tuple[type[Exception], ...] = (
    ZeroDivisionError,
    torch.OutOfMemoryError,
    RuntimeError,
    ValueError,
    StopIteration,
    OwnError,
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What fails.

    Attributes:
        kind: of KINDS.
        position: of the batch among all that are given.
        raised: the number of the exception in RAISED.
    """

    kind: str
    position: int
    microbatch: int = 0
    layer: int = 0
    replica: int = 0
    raised: int = 0


class Failing:
    """Raises what ``failures`` say, each once; shared by a pipeline's copies of its layers.

    Attributes:
        met: the failures that have been raised, or seen to be due in what a batch is given.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self._left = list(failures)
        self._calls: collections.Counter[tuple[int, int]] = collections.Counter()
        self.met: list[Failure] = []

    def of_forward(self, layer: int, tags: torch.Tensor, *, training: bool) -> None:
        if not training:
            self.look("evaluation", tags, layer)
            return
        if threading.current_thread() is threading.main_thread():
            return
        place = layer, int(tags[0])
        self._calls[place] += 1
        self.look("forward" if self._calls[place] == 1 else "second forward", tags, layer)

    def look(self, kind: str, tags: torch.Tensor, layer: int = 0) -> None:
        if self.is_due(kind, tags, layer):
            raise RAISED[self.met[-1].raised]("on purpose")

    def is_due(self, kind: str, tags: torch.Tensor, layer: int = 0) -> bool:
        if threading.current_thread() is threading.main_thread():
            return False  # the capture, or the oracle
        position, row = divmod(int(tags[0]), _TAGS)
        return self.meet(kind, position, row // ROWS, layer)

    def meet(self, kind: str, position: int, microbatch: int = 0, layer: int = 0) -> bool:
        for failure in self._left:
            place = failure.kind, failure.position, failure.microbatch, failure.layer
            if place == (kind, position, microbatch, layer):
                self._left.remove(failure)
                self.met.append(failure)
                return True
        return False


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[], None]) -> torch.Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.look()
        return gradients[0], None


class Layer(nn.Module):
    """A linear layer that counts its calls in a buffer, and fails as ``failing`` says."""

    def __init__(self, number: int, failing: Failing, *, norm: bool, dropout: bool) -> None:
        super().__init__()
        self.number, self.failing = number, failing
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)  # norms take one away
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2 if dropout else 0.0)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_forward_hook(_look_after_forward)

    def forward(self, x: torch.Tensor, tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        failing, number = self.failing, self.number
        failing.of_forward(number, tags, training=self.training)
        if self.training:
            self.num_calls += 1
        # Its gradient comes after the input's, which the stage may have sent by then.
        weight = _Raises.apply(
            self.linear.weight, lambda: failing.look("weight gradient", tags, number)
        )
        y = linear(x, weight)
        y = _Raises.apply(y, lambda: failing.look("backward", tags, number))
        if y.requires_grad:
            y.register_hook(lambda gradient: failing.look("hook", tags, number))
        return x + self.dropout(self.norm(y).tanh()), tags


def _look_after_forward(layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    if layer.training:
        assert isinstance(layer, Layer)
        layer.failing.look("module hook", args[1], layer.number)


def make_model(
    failing: Failing, num_layers: int, *, norm: bool, dropout: bool, tied: bool
) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layer(i, failing, norm=norm, dropout=dropout) for i in range(num_layers)]
    if tied:
        layers[-1].linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers)


class Whole(nn.Module):
    """The layers as one module."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x, tags = layer(x, tags)
        return x, tags


def loss_of(failing: Failing) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        x, tags = output
        failing.look("loss", tags)
        if failing.is_due("wrong loss", tags):
            return (x - target).square()
        return mse_loss(x.float(), target)

    return loss_fn


def metric_of(failing: Failing) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def metric(output: Any, target: torch.Tensor) -> torch.Tensor:
        failing.look("metric", output[1])
        return output[0].float().abs().mean()

    return metric


def batches(count: int, num_microbatches: int, seed: int) -> list[Batch]:
    """Batch i carries the tags of position i."""
    random = torch.Generator().manual_seed(seed)
    rows = ROWS * num_microbatches

    def draw() -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=random)

    return [Batch((draw(), tags_of(position, rows)), draw()) for position in range(count)]


def tags_of(position: int, rows: int) -> torch.Tensor:
    return position * _TAGS + torch.arange(rows)


def spoiled(batch: Batch, kind: str) -> Batch:
    """Of a wrong width or dtype."""
    x, tags = batch.args
    wrong = torch.ones(len(x), WIDTH + 1) if kind == "width" else x.long()
    return Batch((wrong, tags), batch.target)
