"""The stages that are trained: transformer blocks, stages that sleep, stages of almost no work."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
from typing import Any

import torch
from torch import nn


def mse_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What nn.functional.mse_loss calls, without its Python: that takes longer than the loss."""
    mean = 1
    loss: torch.Tensor = torch._C._nn.mse_loss(output, target, mean)
    return loss


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP. Input and output: [rows, sequence, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, sequence, hidden = x.shape
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(rows, sequence, 3, self.heads, hidden // self.heads).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(rows, sequence, hidden))
        return x + self.mlp(self.mlp_norm(x))


_OVERSLEPT_SECONDS = 0.05e-3
_threads_with_exact_timers = threading.local()


def sleep_until(end: float) -> None:
    """Returns at ``end``, not when the system has got around to waking us after it."""
    if not hasattr(_threads_with_exact_timers, "set"):
        _threads_with_exact_timers.set = True
        if sys.platform == "linux":  # its timers may be 50 microseconds late
            pr_set_timerslack = 29
            ctypes.CDLL(None).prctl(pr_set_timerslack, 1)
    time.sleep(max(0.0, end - time.perf_counter() - _OVERSLEPT_SECONDS))
    while time.perf_counter() < end:
        pass


class _SleepingScale(torch.autograd.Function):
    """x * scale, whose backward lasts the given time."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, backward_seconds: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.backward_seconds = backward_seconds
        return x * scale

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        end = time.perf_counter() + ctx.backward_seconds
        x, scale = ctx.saved_tensors
        gradients = gradient * scale, (gradient * x).flatten(0, -2).sum(0)
        sleep_until(end)
        return *gradients, None


class SleepingStage(nn.Module):
    """Takes its time without a processor's: stages may outnumber the cores.

    The times include what the stage itself computes.
    """

    def __init__(self, width: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self.forward_seconds
        y: torch.Tensor = _SleepingScale.apply(x, self.scale, self.backward_seconds)
        sleep_until(end)
        return y


class _Clock:
    """When the next part of a microbatch's backward begins, if something is running it already."""

    def __init__(self) -> None:
        self.begins: float | None = None


class _BackwardBegins(torch.autograd.Function):
    """The same values; starts the clock when their gradient comes."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, clock: _Clock
    ) -> torch.Tensor:
        ctx.clock = clock
        return x.clone()  # torch detaches a stage's output in place, which a view would not allow

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        ctx.clock.begins = time.perf_counter()
        return gradient, None


class _SlowGradient(torch.autograd.Function):
    """The same values; their gradient takes the given time, counted from the clock."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, clock: _Clock, seconds: float, is_last: bool
    ) -> torch.Tensor:
        ctx.clock, ctx.seconds, ctx.is_last = clock, seconds, is_last
        return x.view_as(x)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        begins = ctx.clock.begins
        end = (time.perf_counter() if begins is None else begins) + ctx.seconds
        ctx.clock.begins = None if ctx.is_last else end
        sleep_until(end)
        return gradient, None, None, None


class SleepingHalves(nn.Module):
    """Sleeps for the input's gradient and for the weight's separately, so that W can be deferred.

    A whole backward does the weight's part first, as a linear layer at a stage's beginning would
    have it: no gradient leaves before both are done. The times include what the stage itself
    computes.
    """

    def __init__(
        self, width: int, forward_seconds: float, input_seconds: float, weight_seconds: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.forward_seconds = forward_seconds
        self.input_seconds, self.weight_seconds = input_seconds, weight_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self.forward_seconds
        clock = _Clock()
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # the first stage does as much as the others
        x = _SlowGradient.apply(x, clock, self.input_seconds, True)
        # Made later, hence run earlier by autograd.
        weight = _SlowGradient.apply(self.weight, clock, self.weight_seconds, False)
        y: torch.Tensor = _BackwardBegins.apply(x @ weight, clock)
        sleep_until(end)
        return y


class Scale(nn.Module):
    """Almost no work: one multiplication."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the stages of a pipeline compute and on what: all equal, with the same seed each time.

    ``kind``: "transformer" (``layers`` blocks a stage, and then a stage that sleeps if there are
    ``forward_seconds``), "sleep" or "scale". With
    ``weight_seconds``, a part of ``backward_seconds``, a stage sleeps for its weight's gradient
    apart from its input's.
    """

    kind: str
    rows: int  # of a microbatch
    hidden: int
    layers: int = 1
    sequence: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    weight_seconds: float = 0.0

    def chunk(self, stages_per_rank: int) -> Workload:
        """Of stages which are one of so many parts of these."""
        return dataclasses.replace(
            self,
            layers=max(1, self.layers // stages_per_rank),
            forward_seconds=self.forward_seconds / stages_per_rank,
            backward_seconds=self.backward_seconds / stages_per_rank,
            weight_seconds=self.weight_seconds / stages_per_rank,
        )

    def stage(self, index: int) -> nn.Module:
        torch.manual_seed(index)
        if self.kind == "transformer":
            blocks: list[nn.Module] = [
                TransformerBlock(self.hidden, max(1, self.hidden // 64)) for _ in range(self.layers)
            ]
            if self.forward_seconds > 0:
                times = self.forward_seconds, self.backward_seconds
                blocks.append(SleepingStage(self.hidden, *times))
            return nn.Sequential(*blocks)
        if self.weight_seconds > 0:
            input_seconds = self.backward_seconds - self.weight_seconds
            return SleepingHalves(
                self.hidden, self.forward_seconds, input_seconds, self.weight_seconds
            )
        if self.kind == "sleep":
            return SleepingStage(self.hidden, self.forward_seconds, self.backward_seconds)
        return Scale(self.hidden)

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target."""
        generator = torch.Generator().manual_seed(0)
        shape = [self.rows * num_microbatches, self.hidden]
        if self.sequence:
            shape.insert(1, self.sequence)
        x, target = (torch.randn(shape, generator=generator) for _ in range(2))
        return x, target

    def times_in_words(self) -> str:
        forward, backward = self.forward_and_backward_seconds()
        return (
            f"a microbatch's forward on one stage {1e3 * forward:.2f} ms, "
            f"backward {1e3 * backward:.2f} ms"
        )

    def forward_and_backward_seconds(self, repeats: int = 5) -> tuple[float, float]:
        """Of one microbatch on one stage, alone: the shortest of ``repeats``."""
        stage = self.stage(0)
        x, target = self.batch(1)
        x.requires_grad_()
        forwards, backwards = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            loss = mse_loss(stage(x), target)
            middle = time.perf_counter()
            loss.backward()
            backwards.append(time.perf_counter() - middle)
            forwards.append(middle - start)
        return min(forwards), min(backwards)
