"""Sites that train apart and average seldom (DiLoCo, arXiv 2311.08105), by definition.

Each site trains by an oracle of its own. After batch t, of the parameters whose turn it is,

    D = (1/n) * ((A - W_0) + (A - W_1) + ...),   A := outer(A, D),   W_r(t+1) := A,

where outer is SGD with Nesterov momentum, written out as torch documents it. What a site's next
batch reads is the oracle's matter: it has a version for each delay. Shares nothing with the
package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Trained(Protocol):
    """One site's: versions are the weights, oldest first; the model has the last ones."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def versions(self) -> list[list[torch.Tensor]]: ...

    def train_step(self, batch: Any) -> Any: ...


class SeldomOracle:
    """Trains sites batch by batch.

    Args:
        sites: which begin with equal weights.
        offsets: of each parameter: it is averaged after batches t with (t + 1) % every == offset.
    """

    def __init__(
        self,
        sites: Sequence[Trained],
        every: int,
        offsets: Sequence[int],
        *,
        lr: float,
        momentum: float,
    ) -> None:
        self.sites, self.every, self.offsets = sites, every, offsets
        self.lr, self.momentum = lr, momentum
        self.since = 0
        self.num_batches = 0
        self.anchors = [weight.clone() for weight in sites[0].versions[-1]]
        self.buffers: list[torch.Tensor | None] = [None for _ in self.anchors]

    def train_step(self, batches: Sequence[Any]) -> list[Any]:
        """One batch of each site; their losses."""
        losses = [site.train_step(batch) for site, batch in zip(self.sites, batches, strict=True)]
        self.num_batches += 1
        for i, offset in enumerate(self.offsets):
            if (self.num_batches - self.since) % self.every == offset:
                self._average(i)
        return losses

    def _average(self, i: int) -> None:
        anchor = self.anchors[i]
        gradient = anchor - self.sites[0].versions[-1][i]
        for site in self.sites[1:]:
            gradient = gradient + (anchor - site.versions[-1][i])
        gradient = gradient / len(self.sites)
        buffer = self.buffers[i]
        buffer = gradient if buffer is None else (buffer * self.momentum).add(gradient)
        self.buffers[i] = buffer
        step = gradient.add(buffer, alpha=self.momentum)
        self.anchors[i] = anchor.add(step, alpha=-self.lr)
        for site in self.sites:
            site.versions[-1][i] = self.anchors[i].clone()
            with torch.no_grad():
                list(site.model.parameters())[i].copy_(self.anchors[i])
