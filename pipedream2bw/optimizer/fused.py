"""Which optimizers the engine's fused pass computes, with which options, and their state."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..runtime.stage_values import masters_shown
from ..runtime.stage_weights import StageWeights

_STATE_NAMES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}


_STATE_SWITCH = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}
"""The option without which a parameter has no such state."""


def fused_kind(optimizer: torch.optim.Optimizer, dtypes: Iterable[torch.dtype]) -> str | None:
    """Which fused pass computes what this optimizer computes, if one does.

    Args:
        dtypes: of the parameters that it steps here.
    """
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    kind = kinds.get(type(optimizer))
    if kind is None:
        return None
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return None
        if any(isinstance(group.get(key), torch.Tensor) for key in ("betas", "eps")):
            return None
    return kind if set(dtypes) <= {torch.float32, torch.float64} else None


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


Holder = tuple[str | None, torch.optim.Optimizer, dict[str, Any]]
"""A group of parameters, with its optimizer and the fused pass that computes that, if one does."""


def set_fused(
    stage: StageWeights,
    kinds: Iterable[str | None],
    groups: Sequence[dict[str, Any]],
    holders: Mapping[int, Holder],
    *,
    keeps_bfloat16: bool = False,
) -> None:
    """Makes the engine's fused passes step a stage's weights as these optimizers do.

    Args:
        groups: of all optimizers, in the order of the options that each step gets.
        holders: by the parameters' id.
        keeps_bfloat16: whether they round what error feedback keeps.
    """
    numbers = {id(group): number for number, group in enumerate(groups)}
    of_stage = [holders[id(original)] for original in stage.originals]
    places = [(kind, numbers[id(group)]) for kind, _, group in of_stage]
    stage.engine.set_optimizers(
        {
            fused: [group if kind == fused else -1 for kind, group in places]
            for fused in kinds
            if fused is not None
        },
        keeps_bfloat16,
    )


def show_states(groups: Iterable[Holder], stages: Sequence[StageWeights]) -> None:
    """Puts what the fused passes keep into the optimizers' states."""
    where = {
        id(handle): (weights, i)
        for weights in stages
        for i, handle in enumerate(weights.handles if weights.is_shown else ())
    }
    for kind, optimizer, group in groups:
        for parameter in group["params"] if kind is not None else ():
            if kind is not None and id(parameter) in where:
                weights, i = where[id(parameter)]
                if weights.engine.owns(i):
                    optimizer.state[parameter] = read_state(kind, weights, i, group)


def load_states(
    optimizers: Sequence[torch.optim.Optimizer],
    state_dicts: Sequence[dict[str, Any]],
    stages: Sequence[StageWeights],
    *,
    on_host: bool,
) -> None:
    """Loads what the optimizers' ``state_dict`` gave.

    Args:
        on_host: state stays as it is: torch would bring it to the parameters' device.
    """
    if on_host:
        for optimizer, theirs in zip(optimizers, state_dicts, strict=True):
            optimizer.load_state_dict({**theirs, "state": {}})
            numbers = itertools.chain(*(group["params"] for group in theirs["param_groups"]))
            for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
                if number in theirs["state"]:
                    optimizer.state[parameter] = theirs["state"][number]
        return
    with contextlib.ExitStack() as shown:  # torch gives moments their parameters' dtypes
        for weights in stages:
            shown.enter_context(masters_shown(weights))
        for optimizer, theirs in zip(optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(theirs)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take_states(holders: Mapping[int, Holder], stages: Sequence[StageWeights]) -> None:
    """Gives the fused passes what is in the optimizers' states.

    Args:
        holders: by the parameters' id.
    """
    for weights in stages:
        for i, original in enumerate(weights.originals):
            kind, optimizer, _ = holders[id(original)]
            if kind is not None and weights.engine.owns(i):
                write_state(kind, weights, i, optimizer.state.get(original, {}))


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
