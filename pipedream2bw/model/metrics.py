"""Metrics: numbers that the last stage computes next to the loss."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from ..errors import WrongLossError, WrongLossTypeError

Metric = Callable[[Any, Any], torch.Tensor | float]


@torch.no_grad()
def measure(
    metrics: Mapping[str, Metric], output: Any, target: Any, share: float, device: torch.device
) -> torch.Tensor:
    """Computes a microbatch's part of the batch's metrics; ``share`` is its share of the rows.

    Raises:
        WrongLossError, WrongLossTypeError: a metric is no number.
    """
    values = []
    for name, function in metrics.items():
        value: Any = function(output, target)
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise WrongLossError(
                    f"metrics[{name!r}] returned shape {list(value.shape)} and dtype "
                    f"{value.dtype}: it must return one real number, the mean over the microbatch"
                )
            values.append(value.detach().to(device, torch.double).reshape(()))
        elif isinstance(value, numbers.Real):
            # Filled there: a copy from the host would wait for all that the device has to do.
            values.append(torch.full((), float(value), dtype=torch.double, device=device))
        else:
            raise WrongLossTypeError(
                f"metrics[{name!r}] returned {type(value).__name__}, it must return a number or a "
                "tensor of one"
            )
    return torch.stack(values) * share if values else torch.empty(0)


def computed_loss(loss_fn: Callable[[Any, Any], Any], output: Any, target: Any) -> torch.Tensor:
    """Gives the loss; WrongLossError, WrongLossTypeError: it is not one floating-point number."""
    try:
        loss = loss_fn(output, target)
    except (AttributeError, TypeError) as error:
        if target is not None:
            raise
        raise TypeError(f"loss_fn with target None: {error}. Call train_step(target=)") from error
    if not isinstance(loss, torch.Tensor):
        raise WrongLossTypeError(f"loss_fn returned {type(loss).__name__}, it must return a tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise WrongLossError(
            f"loss_fn returned shape {list(loss.shape)} and dtype {loss.dtype}: it must return "
            "one floating-point number, the mean (or sum) over the microbatch"
        )
    return loss


def refuse_no_graph() -> NoReturn:
    """Raises WrongLossError: the losses do not come from the model's output."""
    raise WrongLossError(
        "loss_fn: no loss of the train_step requires a gradient, so that it would train nothing. "
        "Compute the loss from the model's output, without detach(), item() or no_grad()"
    )


def refuse_other_weights(loss: torch.Tensor, mine: Iterable[torch.Tensor]) -> None:
    """Raises WrongLossError if a loss trains other tensors than the stage's and its inputs."""
    known = set(map(id, mine))
    if loss.is_leaf and id(loss) not in known:  # as torch.tensor(..., requires_grad=True) is
        refuse_no_graph()
    pending, seen = [loss.grad_fn], {None}
    while pending:
        node: Any = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise WrongLossError(
                f"loss_fn: the loss depends on a tensor of shape {list(leaf.shape)} that requires "
                "a gradient and is no weight of the last stage. Weights of the model must be used "
                "in its forward, and hooks must not keep another stage's activations for loss_fn"
            )
        pending += [each for each, _ in node.next_functions]
