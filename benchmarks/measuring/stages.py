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


def _sleep_until(end: float) -> None:
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
        gradients = gradient * scale, (gradient * x).sum(0)
        _sleep_until(end)
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
        _sleep_until(end)
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

    ``kind``: "transformer" (``layers`` blocks a stage), "sleep" or "scale".
    """

    kind: str
    rows: int  # of a microbatch
    hidden: int
    layers: int = 1
    sequence: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    def stage(self, index: int) -> nn.Module:
        torch.manual_seed(index)
        if self.kind == "transformer":
            blocks = [
                TransformerBlock(self.hidden, max(1, self.hidden // 64)) for _ in range(self.layers)
            ]
            return nn.Sequential(*blocks)
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
