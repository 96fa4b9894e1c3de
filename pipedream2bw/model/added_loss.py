"""Losses that are added inside the model instead of in the loss function.

The value is not sent anywhere: an autograd node on the activation gives it its gradient when the
backward passes there, as Megatron-LM's MoEAuxLossAutoScaler does. Neither schedules nor messages
know of it. The node needs the weight that the engine gives the microbatch's loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from .surroundings import attribute_set


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossWeight:
    """How much one microbatch's loss counts.

    Attributes:
        divisor: what losses are divided by where all count alike; 1 if they are sums.
        factor: the microbatch's share of the rows, where losses are means over different numbers.
        replica_weight: of all losses, in the gradients that replicas add up.
        num_averaged: how many train_steps gradients are averaged over.
        scale: what losses are multiplied by (see :class:`LossScale`).
    """

    divisor: int = 1
    factor: float | None = None
    replica_weight: float = 1.0
    num_averaged: int = 1
    scale: float = 1.0

    def seed(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of ``value``, bitwise as the engine seeds the loss."""
        seed = torch.full_like(value, self.replica_weight)
        if self.num_averaged > 1:
            seed = seed / self.num_averaged
        seed = seed / self.divisor if self.factor is None else seed * self.factor
        return seed if self.scale == 1.0 else seed * self.scale


class Weighed:
    """A part of a forward with the weight of its losses, as a context of this thread.

    No generator: every microbatch enters one, and a generator costs five times as much.

    Args:
        weight: of the microbatch's losses; None in an evaluation.
        autocast: is entered, too.

    Attributes:
        has_added: whether the part has added a loss.
        num_waiting: added losses that train, and whose backward has not come.
    """

    has_added = False
    num_waiting = 0

    def __init__(
        self, weight: LossWeight | None, autocast: AbstractContextManager[Any] | None
    ) -> None:
        self.weight, self._autocast = weight, autocast

    def __enter__(self) -> Weighed:
        self._before, _surroundings.weighed = _surroundings.weighed, self
        if self._autocast is not None:
            self._autocast.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        _surroundings.weighed = self._before
        if self._autocast is not None:
            self._autocast.__exit__(*failure)

    def warn_of_lost(self, stage: int) -> None:
        """Warns, once, of added losses to which no backward has come. After the batch's update."""
        if self.num_waiting > 0:
            warnings.warn(
                f"add_loss: {self.num_waiting} of stage {stage} trained nothing, as no backward "
                "came to what it returned. Where that is detached, give "
                "add_loss(x.detach(), value) instead of add_loss(x, value).detach()",
                stacklevel=2,
            )
        self.num_waiting = 0


class _Surroundings(threading.local):
    weighed: Weighed | None = None  # in a forward of a pipeline
    collected: list[torch.Tensor] | None = None


_surroundings = _Surroundings()


def add_loss(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Adds ``value`` to the loss and returns ``x``, which must be used in place of the argument.

    Training is as if ``loss_fn`` had added ``value`` to what it returns, but nothing is sent
    there.

    >>> class Gated(nn.Linear):
    ...     def forward(self, x):
    ...         gates = super().forward(x).softmax(-1)
    ...         return pd2.add_loss(x * gates, 0.01 * gates.square().mean())

    Like the loss, ``value`` is a mean over the microbatch's rows (a sum under
    ``loss_reduction="sum"``), and it counts as much as the microbatch does. The loss that
    ``train_step`` returns does not contain it. ``x`` can be any floating-point activation on the
    way to the loss: ``value`` gets its gradient when the backward comes through the returned
    tensor. A stage that trains by ``value`` alone returns ``add_loss(x.detach(), value)``: where
    the returned tensor is detached, no backward comes, and a warning says so. Nothing is added in
    evaluation, nor outside a pipeline, unless :func:`collect_losses` collects ``value`` there.

    Args:
        x: an activation, any shape.
        value: one floating-point number, with its autograd history.

    Raises:
        TypeError: one of them is no floating-point tensor.
        ValueError: ``value`` has more than one element.
        RuntimeError: the call is repeated by a reentrant checkpoint, where ``value`` would be lost:
            set ``use_reentrant=False``.
    """
    given: tuple[Any, Any] = (x, value)
    for item in given:
        if isinstance(item, fx.Proxy):
            traced: Any = item.tracer.create_proxy("call_function", add_loss, given, {})
            return traced  # type: ignore[no-any-return]
    # To Dynamo of torch before 2.12 all that it traces is exported.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return _exported()(x, value)  # type: ignore[no-any-return]
    for name, tensor in (("x", x), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"add_loss: {name}: {kind} given, it must be a floating-point tensor")
    if value.numel() != 1:
        raise ValueError(
            f"add_loss: value: shape {list(value.shape)}, it must be one number, the mean (or sum) "
            "over the microbatch"
        )
    if torch._C._current_graph_task_id() != -1:  # in a backward
        # Under a checkpoint that saves tensors by hooks the first forward's node stays.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if torch.is_grad_enabled() and hooks is None:
            raise RuntimeError(
                "add_loss: called again by torch.utils.checkpoint(use_reentrant=True), where it "
                "is lost: set use_reentrant=False"
            )
        return x
    weighed = _surroundings.weighed
    if weighed is not None and weighed.weight is not None:
        weighed.has_added = True
        weighed.num_waiting += torch.is_grad_enabled() and value.requires_grad
        return _AddLoss.apply(x, value, weighed)  # type: ignore[no-any-return,no-untyped-call]
    if _surroundings.collected is not None:
        _surroundings.collected.append(value)
    return x


# Compiled graphs break here: what it does depends on the microbatch.
add_loss._torchdynamo_disable = True  # type: ignore[attr-defined]


def restore_added_losses(module: fx.GraphModule) -> None:
    """Puts :func:`add_loss` back in an exported graph, where an operator stands for it."""
    for node in module.graph.nodes:
        if str(node.target) == f"{_OPERATOR.replace('::', '.')}.default":
            node.target = add_loss
    module.recompile()


@contextlib.contextmanager
def collect_losses() -> Iterator[list[torch.Tensor]]:
    """Collects what :func:`add_loss` adds in a model that is no pipeline, in this thread.

    This gives the same training without a pipeline.

    >>> with pd2.collect_losses() as added:
    ...     loss = loss_fn(model(x), y)
    >>> (loss + sum(added)).backward()
    """
    collected: list[torch.Tensor] = []
    with attribute_set(_surroundings, "collected", collected):
        yield collected


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor, weighed: Weighed) -> torch.Tensor:
        assert weighed.weight is not None
        # Not as a saved tensor: a checkpoint around the call would count it.
        ctx.seed, ctx.weighed = weighed.weight.seed(value.detach()), weighed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.weighed.num_waiting -= ctx.needs_input_grad[1]
        return gradients[0], ctx.seed, None


_OPERATOR = "pipedream2bw::add_loss"


@functools.cache
def _exported() -> Any:
    """Makes the operator that stands for :func:`add_loss` in an exported graph."""

    @torch.library.custom_op(_OPERATOR, mutates_args=())
    def operator(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @operator.register_fake
    def _(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    return operator
