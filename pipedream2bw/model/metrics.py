"""Metrics: numbers that the last stage computes next to the loss."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any

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
    return torch.stack(values) * share


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
    if torch.is_grad_enabled() and not loss.requires_grad:
        warnings.warn(
            "loss_fn returned a loss whose requires_grad is False: the microbatch trains nothing. "
            "Compute the loss from the model's output, without detach() or item()",
            stacklevel=2,
        )
    return loss
