"""Delayed training in mixed precision, by definition, on the unsplit model with stock PyTorch.

    W(t+1) = step(W(t), state(t), g(t)),   g(t) the gradient at round(W(max(t - delay, 0)))

With error feedback the model's weights make plain steps, and W(t+1) is what is ahead of them. W is
float32; forward and backward are those of a model of rounded weights. g is the sum over each
replica's microbatches, in their order, and then over the replicas in theirs. It is made of float32,
or `narrow`: of the gradients as they come, in their dtype, to which every sum is rounded, and what
unscaling and clipping make of it; the step reads it as float32. With a loss scale s(t), a batch's
loss is multiplied by that of the version that it reads, and a gradient that is not finite anywhere
leaves W(t+1) = W(t) and s(t+1) = s(t) * backoff. Shares nothing with the package.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.references.oracle import Batch, Drawing, LossFunction

_FLOAT = torch.float32
Round = Callable[[torch.Tensor], torch.Tensor]


class MixedOracle:
    """Trains ``model``, which holds the newest float32 weights.

    Args:
        low: a copy of the model in the dtypes to compute in.
        optimizer: over the model's parameters.
        narrow: gradients stay as they come. Else they become float32.
        round_to: gives the weights of ``low``; by default as ``copy_`` does.
        scale: of W(0), if there is loss scaling, with ``growth_interval``; factors 2 and 0.5.
        clip: called before a step with parameters that have the gradients.
        left_out: called in the place of a step.
        drawing: as for :class:`tests.references.oracle.Oracle`.
    """

    def __init__(
        self,
        model: nn.Module,
        low: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_microbatches: int,
        loss_fn: LossFunction,
        delay: int,
        *,
        dtype: torch.dtype,
        narrow: bool = False,
        round_to: Round = lambda weight: weight,
        scale: float | None = None,
        growth_interval: int = 2000,
        clip: Callable[[list[nn.Parameter]], object] = lambda parameters: None,
        left_out: Callable[[], object] = lambda: None,
        drawing: Drawing = lambda train_step, microbatch: contextlib.nullcontext(),
    ) -> None:
        self.model, self.low, self.optimizer = model, low, optimizer
        self.num_microbatches, self.loss_fn, self.delay = num_microbatches, loss_fn, delay
        self.dtype, self.round_to, self.clip = dtype, round_to, clip
        self.left_out, self.drawing = left_out, drawing
        self.narrow = narrow
        self.scales = [1.0 if scale is None else scale]
        self.has_scale = scale is not None
        self.growth_interval = growth_interval
        self.since_change = 0
        self.num_train_steps = 0
        self.versions = [self._weights()]
        self.num_overflows = 0

    def train_step(self, batch: Batch) -> float:
        return self.train_replicas([batch])[0]

    def train_replicas(self, batches: Sequence[Batch]) -> list[float]:
        version = max(len(self.versions) - 1 - self.delay, 0)
        with torch.no_grad():
            for low, weight in zip(self.low.parameters(), self.versions[version], strict=True):
                low.copy_(self.round_to(weight))
        by_replica: list[list[torch.Tensor | None]] = []
        losses = []
        for replica, batch in enumerate(batches):
            sums: list[torch.Tensor | None] = [None for _ in self.low.parameters()]
            total: torch.Tensor | None = None
            for j in range(self.num_microbatches):
                self.low.zero_grad(set_to_none=True)
                with self.drawing(self.num_train_steps, replica * self.num_microbatches + j):
                    loss = self._microbatch(batch, j)
                    seed = torch.full_like(loss, 1 / len(batches)) / self.num_microbatches
                    loss.backward(seed * self.scales[version])
                sums = [
                    before if p.grad is None else added(before, self._kept(p.grad))
                    for before, p in zip(sums, self.low.parameters(), strict=True)
                ]
                share = loss.detach() / self.num_microbatches
                total = share if total is None else total + share
            assert total is not None
            losses.append(float(total))
            by_replica.append(sums)
        self.num_train_steps += 1
        gradients = [functools.reduce(added, of_one) for of_one in zip(*by_replica, strict=True)]
        self._update([None if g is None else g * (1 / self.scales[version]) for g in gradients])
        return losses

    def _kept(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.narrow else gradient.float()

    def _microbatch(self, batch: Batch, j: int) -> torch.Tensor:
        def part(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.tensor_split(self.num_microbatches)[j]

        def low(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(self.dtype) if leaf.is_floating_point() else leaf

        batch = pytree.tree_map_only(torch.Tensor, part, batch)
        args, kwargs = pytree.tree_map_only(torch.Tensor, low, (batch.args, dict(batch.kwargs)))
        return self.loss_fn(self.low(*args, **kwargs), batch.target)

    def _update(self, gradients: list[torch.Tensor | None]) -> None:
        finite = all(bool(g.isfinite().all()) for g in gradients if g is not None)
        scale = self.scales[-1]
        if finite or not self.has_scale:
            holders = list((self.low if self.narrow else self.model).parameters())
            for holder, gradient in zip(holders, gradients, strict=True):
                holder.grad = gradient
            self.clip(holders)
            for parameter, holder in zip(self.model.parameters(), holders, strict=True):
                parameter.grad = None if holder.grad is None else holder.grad.float()
            self.optimizer.step()
            self.since_change += 1
            if self.has_scale and self.since_change == self.growth_interval:
                scale, self.since_change = scale * 2, 0
        else:
            self.num_overflows += 1
            self.left_out()
            scale, self.since_change = scale * 0.5, 0
        self.scales.append(scale)
        self.versions.append(self._weights())

    def _weights(self) -> list[torch.Tensor]:
        ahead = getattr(self.optimizer, "ahead", {})  # of error feedback
        return [ahead.get(p, p).detach().clone() for p in self.model.parameters()]


def masters_of(model: nn.Module, low: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``model`` of which ``low`` has roundings."""
    pairs = zip(model.parameters(), low.parameters(), strict=True)
    return {master for master, weight in pairs if weight.dtype != master.dtype}


def lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with all in ``dtype`` but what keeps running statistics."""
    low = copy.deepcopy(model).to(dtype)
    for module in low.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.float()
    return low


def half_away(weight: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16, of two equally near ones that of larger magnitude, as float32."""
    bits = weight.contiguous().view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(torch.float32)


def added(before: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The sum; a gradient that is missing adds nothing."""
    if before is None or gradient is None:
        return gradient if before is None else before
    return before + gradient


def clip_norm(
    parameters: list[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``, but that norms of 16-bit gradients are float32."""
    norms = [
        torch.linalg.vector_norm(p.grad, norm_type, dtype=torch.promote_types(p.dtype, _FLOAT))
        for p in parameters
        if p.grad is not None
    ]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
