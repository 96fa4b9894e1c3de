"""Which optimizers the engine's fused pass computes, with which options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..runtime.stage_weights import StageWeights


def fused_kind(optimizer: torch.optim.Optimizer, dtypes: Iterable[torch.dtype]) -> str | None:
    """Which fused pass computes what this optimizer computes, if one does.

    Args:
        dtypes: of the parameters that it steps here.
    """
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    kind = kinds.get(type(optimizer))
    if kind is None or step_hooks(optimizer):
        return None
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return None
        if any(isinstance(group.get(key), torch.Tensor) for key in ("betas", "eps")):
            return None
    return kind if set(dtypes) <= {torch.float32, torch.float64} else None


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The optimizer's own hooks of its step."""
    return [
        hook
        for name, hooks in vars(optimizer).items()
        if name.startswith("_optimizer_step")
        for hook in hooks.values()
    ]


def fused_options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> _C.GroupOptions:
    """A group's options as they are now."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    maximize = bool(group["maximize"])
    if "betas" in group:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        return _C.GroupOptions(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            amsgrad=bool(group["amsgrad"]),
            decoupled_weight_decay=bool(decoupled),
        )
    return _C.GroupOptions(
        lr=lr,
        weight_decay=weight_decay,
        maximize=maximize,
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


Holder = tuple[str | None, torch.optim.Optimizer, dict[str, Any]]
"""A group of parameters, with its optimizer and the fused pass that computes that, if one does."""

Holders = Mapping[int, Holder]
"""What holds each parameter, by the parameter's id."""


def set_fused(
    stage: StageWeights,
    kinds: Iterable[str | None],
    groups: Sequence[dict[str, Any]],
    holders: Holders,
) -> None:
    """Makes the engine's fused passes step a stage's weights as these optimizers do.

    Args:
        groups: of all optimizers, in the order of the options that each step gets.
    """
    numbers = {id(group): number for number, group in enumerate(groups)}
    of_stage = [holders[id(original)] for original in stage.originals]
    places = [(kind, numbers[id(group)]) for kind, _, group in of_stage]
    stage.engine.set_optimizers(
        {
            fused: [group if kind == fused else -1 for kind, group in places]
            for fused in kinds
            if fused is not None
        }
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
