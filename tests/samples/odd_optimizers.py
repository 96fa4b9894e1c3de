"""Optimizers as users write them, that do what those of torch do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Parameters = Iterable[nn.Parameter]


class CountsInGroup(torch.optim.Optimizer):
    """Keeps its count, and a rate of its own, in the group; step() has arguments with defaults."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "last": []})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 0.5, **options: Any) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            rate = group["lr"] * scale / group["count"]
            group["last"] = [*group["last"][-1:], rate]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-sum(group["last"]))


class ScheduleFree(torch.optim.Optimizer):
    """Trains at y and evaluates at x, as schedule-free SGD does (arXiv 2405.15682)."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.75) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, weight_of: Any, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight_of(group["beta"]))
                group["train_mode"] = train_mode

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            c, beta = 1 / group["k"], group["beta"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, c)
                y.add_(y.grad, alpha=group["lr"] * (beta * (1 - c) - 1))
                z.sub_(y.grad, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Made of another optimizer, whose groups it shares (arXiv 1907.08610)."""

    def __init__(self, base: torch.optim.Optimizer, every: int = 2, alpha: float = 0.5) -> None:
        self.base, self.every, self.alpha = base, every, alpha
        super().__init__(base.param_groups, {"calls": 0})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.clone())
        self.base.step()
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if group["calls"] % self.every == 0:
                    slow = self.state[parameter]["slow"]
                    parameter.copy_(slow.lerp_(parameter, self.alpha))


class Together(torch.optim.Optimizer):
    """Several optimizers as one, for a reference: nothing of the package."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([{"params": []}], {})
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class CountsBeside(torch.optim.Optimizer):
    """Keeps counts beside its parameters' states: in ``state``, in a group and in attributes.

    All are of its own parameters' gradients, so that each stage has others.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "norm": 0.0})
        self.total, self.last = 0.0, [0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total, self.last = state_dict["total"], list(state_dict["last"])
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = sum(float(p.grad.square().sum()) for p in given if p.grad is not None)
            group["norm"] += norm
            if "sum" not in self.state:
                self.state["sum"] = torch.zeros(1)  # type: ignore[index,assignment]
            self.state["sum"] += norm  # type: ignore[index,operator]
            self.total += norm
            self.last.append(self.last.pop(0) + norm)
            rate = group["lr"] / (1 + group["norm"] + float(self.state["sum"]) + self.total)  # type: ignore[index,arg-type]
            for parameter in given:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=rate / (1 + self.last[0]))
