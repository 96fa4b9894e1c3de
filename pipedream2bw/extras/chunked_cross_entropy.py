"""Cross-entropy of a linear layer's outputs, without all of them in memory at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ..checks import check_whole_number

_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    num_chunks: int = 8,
) -> torch.Tensor:
    """Returns the cross-entropy of ``hidden @ weight.T + bias`` without keeping these logits.

    It is ``cross_entropy(linear(hidden, weight, bias), target)`` but for rounding. Logits are made
    for a ``num_chunks``-th of the rows at a time. Their gradient takes their place at once, as in
    Liger kernels (arXiv 2410.10989): of a language model's [rows, vocabulary] tensors, which the
    plain form has three of, a chunk's is all that ever exists. What lasts until the backward is the
    gradient of ``hidden`` and that of ``weight``; nothing is computed twice.

    Call it in a pipeline's model, as a whole, or in its ``loss_fn``.

    >>> hidden, weight, target = torch.randn(6, 8), torch.randn(100, 8), torch.arange(6)
    >>> loss = pd2.linear_cross_entropy(hidden, weight, target, num_chunks=3)
    >>> torch.allclose(loss, nn.functional.cross_entropy(hidden @ weight.T, target))
    True

    Args:
        hidden: [..., features], floating point.
        weight: [classes, features], in the same dtype; under autocast both are cast as
            ``torch.nn.functional.linear`` casts them.
        target: [...], int64: classes, or ``ignore_index`` for rows that count for nothing.
        bias: [classes].
        reduction: "mean" over the rows that count, or "sum". Both are 0 where no row counts.
        ignore_index: see ``target``.
        num_chunks: of the rows, at least 1; no more than there are rows are made.

    Returns:
        One number of float32 for 16-bit ``hidden``, else of its dtype. It can be differentiated
        once.

    Raises:
        ValueError: shapes do not go together, or an argument is none of the above.
        TypeError: a dtype is none of the above.
    """
    tensors: tuple[Any, ...] = (hidden, weight, target, bias)
    options = {"reduction": reduction, "ignore_index": ignore_index, "num_chunks": num_chunks}
    for value in (*tensors, *options.values()):
        if isinstance(value, fx.Proxy):
            traced: Any = value.tracer.create_proxy(
                "call_function", linear_cross_entropy, tensors, options
            )
            return traced  # type: ignore[no-any-return]
    _check(hidden, weight, target, bias, reduction)
    check_whole_number("num_chunks", num_chunks)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    differentiated = [
        torch.is_grad_enabled() and value is not None and value.requires_grad
        for value in (hidden, weight, bias)
    ]
    rows = target.reshape(-1)
    hidden = hidden.reshape(-1, weight.shape[1])
    loss, *_ = _operator()(
        hidden, weight, rows, bias, reduction, ignore_index, num_chunks, differentiated
    )
    return loss  # type: ignore[no-any-return]


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
) -> None:
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"hidden: shape {list(hidden.shape)}, target: shape {list(target.shape)}: they must "
            "agree but for hidden's last dimension"
        )
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: shape {list(hidden.shape)}, weight: shape {list(weight.shape)}: weight must "
            "be [classes, features], hidden [..., features]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias: shape {list(bias.shape)}, weight: shape {list(weight.shape)}: bias must be "
            "[classes]"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r}, it must be one of {', '.join(_REDUCTIONS)}")
    if target.dtype != torch.int64:
        raise TypeError(f"target: {target.dtype}, it must be torch.int64")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden: {hidden.dtype}, it must be a floating-point tensor")


@functools.cache
def _operator() -> Any:
    """Makes the operator: captured models call it as one."""

    operator = torch.library.custom_op(
        "pipedream2bw::linear_cross_entropy", loss_and_gradients, mutates_args=()
    )

    @operator.register_fake
    def _(hidden: torch.Tensor, weight: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        *_, differentiated = others
        loss = hidden.new_empty((), dtype=_dtype_of_sums(hidden))
        return (loss, *_zeros(hidden, weight, differentiated))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        _, *gradients = output
        ctx.mark_non_differentiable(*gradients)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*gradients)
        _, weight, _, bias, *_ = inputs
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)

    def backward(ctx: Any, seed: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if seed is None:
            return (None,) * 8
        hidden, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        return (
            (hidden * seed).to(hidden.dtype) if ctx.needs_input_grad[0] else None,
            (weight * seed).to(of_weight) if ctx.needs_input_grad[1] else None,
            None,
            (bias * seed).to(of_bias) if ctx.needs_input_grad[3] else None,
            None,
            None,
            None,
            None,
        )

    operator.register_autograd(backward, setup_context=keep)
    return operator


def _dtype_of_sums(hidden: torch.Tensor) -> torch.dtype:
    return torch.float32 if hidden.element_size() < 4 else hidden.dtype


def _zeros(
    hidden: torch.Tensor, weight: torch.Tensor, differentiated: Sequence[bool]
) -> list[torch.Tensor]:
    """For the gradients of ``hidden``, ``weight`` and the bias; empty where nobody wants it."""
    dtype = _dtype_of_sums(hidden)
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (hidden.dtype, dtype, dtype)
    return [
        hidden.new_zeros(shape if is_wanted else (0,), dtype=dtype)
        for shape, dtype, is_wanted in zip(shapes, dtypes, differentiated, strict=True)
    ]


def loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
    num_chunks: int,
    differentiated: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss and its gradients of ``hidden``, ``weight`` and the bias."""
    dtype = _dtype_of_sums(hidden)
    counts = target != ignore_index
    classes = target.where(counts, 0).unsqueeze(1)
    scale = counts.unsqueeze(1).to(dtype)
    if reduction == "mean":
        scale /= counts.sum().clamp(min=1)
    loss = hidden.new_zeros((), dtype=dtype)
    of_hidden, of_weight, of_bias = _zeros(hidden, weight, differentiated)
    of_inputs, of_weights, of_biases = differentiated
    num_chunks = min(num_chunks, max(1, len(target)))
    parts = (each.tensor_split(num_chunks) for each in (hidden, classes, scale, of_hidden))
    for rows, chosen, scales, of_rows in zip(*parts, strict=True):
        logits = functional.linear(rows, weight, bias).to(dtype)
        torch.log_softmax(logits, dim=1, out=logits)
        # Of a row that does not count class 0 is taken, which may be infinitely unlikely.
        loss -= (logits.gather(1, chosen) * scales).where(scales > 0, 0.0).sum()
        if not any(differentiated):
            continue
        # From here on their gradient: scale * (softmax - 1 at the target).
        logits.exp_().mul_(scales).scatter_add_(1, chosen, -scales)
        gradient = logits.to(rows.dtype)
        if of_inputs:
            torch.mm(gradient, weight, out=of_rows)
        if of_weights and dtype == rows.dtype:
            of_weight.addmm_(gradient.T, rows)
        elif of_weights:
            of_weight += gradient.T @ rows
        if of_biases:
            of_bias += logits.sum(0)
    return loss, of_hidden, of_weight, of_bias
