"""Stages that show whether a forward was run again as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.samples.models import WIDTH


def homogeneous(dropout: nn.Module) -> list[nn.Module]:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), dropout)

    return [stage(), stage(), stage()]


def total(output: torch.Tensor, target: None) -> torch.Tensor:
    return output.sum()


class Attention(nn.Module):
    """Random numbers drawn inside an operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.ones(1, 1, x.shape[0], 4, dtype=x.dtype)
        v = x.reshape(1, 1, *x.shape)
        return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5).reshape(x.shape)


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.linear(x.clone()).tanh()


class Counts(nn.Module):
    """A buffer that every forward reads and changes."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.linear(x) / self.count


class InnerBackward(torch.autograd.Function):
    """x * w, whose backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            y: torch.Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = InnerBackward.apply(x, self.linear)  # type: ignore[no-untyped-call]
        return y


class OneAfterTheOther(nn.Module):
    """As nn.Sequential, but traced into its parts."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class StatefulParts(nn.Module):
    """A block whose layers are used with others between them, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counts(), Counts()]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[1](self.parts[0](x) * 2)
        y: torch.Tensor = self.parts[3](self.parts[2](x + 1))
        return y
