"""The state that fused passes keep, as the stock optimizers have it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..runtime.stage_values import masters_shown
from ..runtime.stage_weights import StageWeights
from .fused import Holder, Holders, parameters_of

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
            beside = {key: v for key, v in theirs["state"].items() if not isinstance(key, int)}
            optimizer.load_state_dict({**theirs, "state": beside})
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


def take_states(holders: Holders, stages: Sequence[StageWeights]) -> None:
    """Gives the fused passes what is in the optimizers' states."""
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
