"""Remedies for the delay as optimizers of plain PyTorch: nothing of the package."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


class Discounted(torch.optim.Optimizer):
    """Divides the learning rates of the first ``num_batches`` batches after the warm-up.

    Args:
        delays: of each parameter, if they are not all 1.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        num_batches: int,
        warmup: int,
        delays: Sequence[int] | None = None,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.inner, self.num_batches, self.warmup = inner, num_batches, warmup
        self.t = 0
        if delays is not None:
            (group,) = inner.param_groups
            of = dict(zip(group["params"], delays, strict=True))
            inner.param_groups[:] = [
                {**group, "params": [p for p in of if of[p] == delay], "delay": delay}
                for delay in sorted(set(delays))
            ]
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [group["lr"] for group in self.param_groups]
        if self.t >= self.warmup:
            p = 1 - min((self.t - self.warmup) / self.num_batches, 1)
            for group in self.param_groups:
                group["lr"] = group["lr"] / (1 + group.get("delay", 1)) ** p
        self.inner.step()
        self.t += 1
        for group, lr in zip(self.param_groups, given, strict=True):
            group["lr"] = lr


class Corrected(torch.optim.Optimizer):
    """Corrects the steps of another optimizer by one of the two rules.

    Attributes:
        masters: parameters to which error feedback adds nothing: weights are rounded from them.
        late_shares: of each parameter, by which error feedback is multiplied; none given: 1.
        ahead: of masters, what weights are rounded from, where that is another value.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: str,
        number: float,
        warmup: int,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.inner, self.rule, self.number = inner, rule, number
        self.param_groups = inner.param_groups
        self.fresh_left = max(warmup, 1)  # batches that have no delay
        self.kept: dict[torch.Tensor, torch.Tensor] = {}
        self.late_shares: dict[torch.Tensor, float] = {}
        self.masters: Collection[torch.Tensor] = ()
        self.ahead: dict[torch.Tensor, torch.Tensor] = {}

    def restart_delay(self) -> None:
        self.fresh_left = 1

    def skip(self) -> None:
        """An update is left out: what is kept stays."""
        self.fresh_left = max(self.fresh_left - 1, 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        before = [p.clone() for p in parameters]
        self.inner.step()
        steps = {p: p - old for p, old in zip(parameters, before, strict=True)}
        if self.rule == "nesterov":
            self._look_ahead(steps)
        else:
            self._feed_back(steps)
        self.fresh_left = max(self.fresh_left - 1, 0)

    def _look_ahead(self, steps: dict[torch.Tensor, torch.Tensor]) -> None:
        for p, u in steps.items():
            moved = u * (1 - self.number)
            if p in self.kept:
                moved = moved + self.kept[p]
            self.kept[p] = moved * self.number
            p.add_(self.kept[p] - u * self.number)

    def _feed_back(self, steps: dict[torch.Tensor, torch.Tensor]) -> None:
        kept, self.kept = self.kept, {}
        for p, u in steps.items():
            share = 0 if self.fresh_left > 0 else self.late_shares.get(p, 1.0)
            if p in self.masters:
                self.ahead[p] = p + u * (self.number * share)
            elif share != 0:
                if p in kept:
                    p.add_((u - kept[p]) * (self.number * share))
                self.kept[p] = u
