"""Which optimizers the engine's fused passes compute, with which options, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    of_both: dict[str, Any] = {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
    }
    if "betas" in group:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        return _C.GroupOptions(
            **of_both,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            amsgrad=bool(group["amsgrad"]),
            decoupled_weight_decay=bool(decoupled),
        )
    return _C.GroupOptions(
        **of_both,
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


Holder = tuple[str | None, torch.optim.Optimizer, dict[str, Any]]
"""A group of parameters, with its optimizer and the fused pass that computes that, if one does."""

Holders = Mapping[int, Holder]
"""What holds each parameter, by the parameter's id."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_STATE_NAMES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}

_STATE_SWITCH = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}
"""The option without which a parameter has no such state."""


def read_state(
    kind: str, stage: StageWeights, parameter: int, group: dict[str, Any]
) -> dict[str, Any]:
    """A parameter's state as the stock optimizer would have it; its tensors are the live ones."""
    count = stage.engine.step_count(parameter)
    read: dict[str, Any] = {}
    if kind == "adam" and count:
        read["step"] = torch.tensor(float(count))
    for name in _STATE_NAMES[kind]:
        # A flat state buffer covers all groups as soon as one of them needs it.
        if name in _STATE_SWITCH and not group[_STATE_SWITCH[name]]:
            continue
        value = stage.engine.optimizer_state(name, parameter)
        if value is not None and count:
            read[name] = value
    return read


def write_state(kind: str, stage: StageWeights, parameter: int, values: dict[str, Any]) -> None:
    """Sets a parameter's state to what a stock optimizer has."""
    for name in _STATE_NAMES[kind]:
        value, old = values.get(name), stage.engine.optimizer_state(name, parameter)
        if value is None and old is not None:
            value = torch.zeros_like(old)
        if value is not None:
            stage.engine.set_optimizer_state(name, parameter, value)
    # SGD has no count of its own; the engine needs to know that the buffer is there.
    default = 1 if values.get("momentum_buffer") is not None else 0
    stage.engine.set_step_count(parameter, int(values.get("step", default)))
