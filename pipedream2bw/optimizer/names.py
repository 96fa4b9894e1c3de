"""Optimizers' dictionaries of state, in which parameters have their names in the model.

Stock optimizers number parameters. Numbers of one process mean nothing to another one, and what
``torch.distributed.checkpoint`` saves is known by its keys: so they are names here. Stock
optimizers load them all the same, as they go by order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .cut import StateByName, as_torch_has_it
from .fused import parameters_of


def state_of_all(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    rooms: Sequence[StateByName],
) -> dict[str, Any]:
    """One dictionary of several optimizers' state, by name.

    Args:
        names: by the parameters' id.
        rooms: of each, in place of its own state; may be empty.
    """
    states = [_with_names(each.state_dict(), each, names) for each in optimizers]
    for state, room in zip(states, rooms, strict=False):
        state["state"] = room
    return states[0] if len(states) == 1 else {"optimizers": states}


def states_of_each(
    state_dict: Mapping[str, Any],
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    known: Collection[str],
) -> list[dict[str, Any]]:
    """What each optimizer loads, of what :func:`state_of_all` or a stock optimizer gave.

    Raises:
        ValueError: it is none, of another number of optimizers, or see :func:`_with_numbers`.
    """
    states = [state_dict] if len(optimizers) == 1 else state_dict.get("optimizers", [])
    if len(states) != len(optimizers):
        raise ValueError(
            f"state_dict of {len(states)} optimizers, the pipeline has {len(optimizers)}: "
            "it must be one that PipelineOptimizer.state_dict() gave"
        )
    for state in states:
        if missing := {"state", "param_groups"}.difference(state):
            raise ValueError(
                f"state_dict without {' and '.join(sorted(missing))}, its keys are "
                f"{sorted(map(str, state))[:5]}: it must be an optimizer's"
            )
    return [
        _with_numbers(state, optimizer, names, known)
        for optimizer, state in zip(optimizers, states, strict=True)
    ]


def _with_names(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with names in place of numbers.

    Args:
        names: by the parameters' id. Without one: what stands for a process's missing parameters.
    """
    order = [names.get(id(parameter)) for parameter in parameters_of(optimizer)]

    def named(numbers: Collection[int]) -> list[str]:
        return [name for number in numbers if (name := order[number]) is not None]

    def key(given: Any) -> Any:
        return order[given] if isinstance(given, int) else given  # an optimizer's own key

    state, groups = state_dict["state"], state_dict["param_groups"]
    return {
        **state_dict,
        "state": {key(given): state[given] for given in state if key(given) is not None},
        "param_groups": [{**group, "params": named(group["params"])} for group in groups],
    }


def _with_numbers(
    state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    known: Collection[str],
) -> dict[str, Any]:
    """What the stock optimizer loads, of a ``state_dict`` with names or with numbers.

    By name each process finds its parameters in the dictionary of any part of the model; what is
    not there begins anew.

    Args:
        names: as above.
        known: the whole model's.

    Raises:
        ValueError: a name is none of the model's; another number of groups.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    members = [each for group in groups for each in group["params"]]
    if any(isinstance(key, int) for key in (*state, *members)):
        return dict(state_dict)
    if unknown := sorted(set(members).difference(known)):
        raise ValueError(f"state_dict: {', '.join(unknown[:3])}: no parameter of the model")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict: {len(groups)} param_groups, the optimizer has "
            f"{len(optimizer.param_groups)}: they must be equal"
        )
    # Of the same groups' members here; where stages were split otherwise there are others.
    options = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]
    whole = as_torch_has_it(optimizer, names, state, options)
    whole["state"].update({key: value for key, value in state.items() if key not in known})
    return whole
