"""An optimizer restricted to some of its parameters, and what it keeps beside their states."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..runtime.stage_weights import StageWeights
from .fused import parameters_of

_State = collections.defaultdict[Any, Any]


class Restriction:
    """An optimizer restricted to some of its parameters.

    It has groups, attributes and what it keeps beside its parameters' states of its own. States of
    parameters that it steps themselves are the optimizer's.

    Args:
        pairs: a parameter of the optimizer, and what it will step instead.
        has_states: whether it begins with the optimizer's states.
    """

    def __init__(
        self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], *, has_states: bool = True
    ) -> None:
        self.handles = [handle for _, handle in pairs]
        self._handle_of = {id(original): handle for original, handle in pairs}
        self._shared = [handle for original, handle in pairs if original is handle]
        self._has_states = has_states
        # By the original's id; optimizers share them with those that they are made of.
        self._groups: dict[int, dict[str, Any]] = {}
        self._states: dict[int, tuple[_State, _State]] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        # Not copy.copy, for which an optimizer has no attributes beyond groups and state.
        part: torch.optim.Optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name == "param_groups":
                part.param_groups = [self._group(group) for group in value]
            elif name == "state":
                part.state = self._state(value)
            else:  # trees of lists, dictionaries and the like
                part.__dict__[name] = pytree.tree_map(self._own, value)
        return part

    def _own(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):  # of which this one is made
            return self.of(value)
        if isinstance(value, nn.Parameter):
            return self._handle_of.get(id(value), value)
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) not in self._groups:
            (mine,) = options_of([group])
            for key, kept in ("params", group["params"]), ("param_names", group.get("param_names")):
                each = zip(group["params"], kept or (), strict=False)
                if kept is not None:
                    mine[key] = [
                        self._handle_of.get(id(value), value)
                        for parameter, value in each
                        if id(parameter) in self._handle_of
                    ]
            self._groups[id(group)] = mine
        return self._groups[id(group)]

    def _state(self, theirs: _State) -> _State:
        if id(theirs) not in self._states:
            mine: _State = collections.defaultdict(dict)
            for key, value in list(theirs.items()) if self._has_states else ():
                handle = self._handle_of.get(id(key))
                if handle is not None:
                    mine[handle] = value if handle is key else copy.deepcopy(value)
                elif not isinstance(key, torch.Tensor):
                    mine[key] = copy.deepcopy(value)
            self._states[id(theirs)] = theirs, mine
        return self._states[id(theirs)][1]

    @contextlib.contextmanager
    def states_shared(self) -> Iterator[None]:
        """The optimizer's states are those of a step that is made inside, before and after it."""
        for theirs, mine in self._states.values():
            for handle in self._shared:
                if handle in theirs:
                    mine[handle] = theirs[handle]
                else:
                    mine.pop(handle, None)
        yield
        for theirs, mine in self._states.values():
            theirs.update((handle, mine[handle]) for handle in self._shared if handle in mine)

    def check_kept(self, part: torch.optim.Optimizer) -> None:
        """Raises TypeError if ``part`` keeps states elsewhere than under their parameters."""
        elsewhere = {
            f"state[{key!r}]": value
            for key, value in part.state.items()
            if isinstance(value, Mapping) and any(isinstance(k, torch.Tensor) for k in value)
        }
        for _, mine in self._states.values():
            if mine and mine is not part.state:
                elsewhere["an optimizer that it is made of"] = mine
        for place in elsewhere:
            raise TypeError(
                f"{type(part).__name__}: it has parameters' states in {place}, they must be in "
                "state[parameter]: checkpoints would lose the others"
            )


Names = Mapping[int, str]
"""The names of this process's parameters in the model, by their id."""


def options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of all that the groups have beside their parameters."""
    return [
        {
            key: copy.deepcopy(value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in groups
    ]


Beside = dict[str, Any]
"""What an optimizer keeps beside its parameters' states.

What its ``state_dict`` has under keys of its own, and: ``state``, under keys that are no
parameters; ``param_groups``, their options. Of a part of it also ``params``, their names.
"""


def beside_states(optimizer: torch.optim.Optimizer) -> Beside:
    """Copies of what an optimizer keeps beside its parameters' states.

    Raises:
        TypeError: its ``state_dict`` is none of an optimizer's.
    """
    given = type(optimizer).state_dict(optimizer)
    if not {"state", "param_groups"} <= given.keys():
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict(): its keys are {sorted(given)[:5]}, they must "
            'include "state" and "param_groups", as those of torch.optim.Optimizer'
        )
    state = {key: value for key, value in given["state"].items() if not isinstance(key, int)}
    groups = options_of(given["param_groups"])
    return copy.deepcopy({**given, "state": state, "param_groups": groups})


def set_beside(optimizer: torch.optim.Optimizer, beside: Beside) -> None:
    """Gives an optimizer what :func:`beside_states` gave of another one."""
    beside = copy.deepcopy(beside)
    groups, states = optimizer.param_groups, optimizer.state
    if own := others_of(beside):
        packed = type(optimizer).state_dict(optimizer)["param_groups"]
        type(optimizer).load_state_dict(optimizer, {**own, "state": {}, "param_groups": packed})
        optimizer.param_groups, optimizer.state = groups, states
    states.update(beside["state"])
    for group, options in zip(groups, beside["param_groups"], strict=True):
        group.update(options)


def others_of(beside: Beside) -> dict[str, Any]:
    """What a ``state_dict`` has under keys of the optimizer's own."""
    return {k: v for k, v in beside.items() if k not in ("state", "param_groups", "params")}


def first_states(
    optimizer: torch.optim.Optimizer, stages: Iterable[StageWeights], names: Names
) -> dict[str, dict[str, Any]]:
    """What the optimizer would keep after a step without gradients, by the parameters' names.

    Of the right kinds and shapes, but the values are none of the run's. The step is made on copies.
    """
    given = set(map(id, parameters_of(optimizer)))
    found: dict[str, dict[str, Any]] = {}
    for stage in stages:
        pairs = []
        for i, original in enumerate(stage.originals if stage.is_shown else ()):
            if id(original) in given:
                master = stage.engine.master(stage.engine.newest_slot, i)
                pairs.append((original, nn.Parameter(master.detach().clone())))
        if pairs:
            part = _stepped(optimizer, Restriction(pairs, has_states=False), torch.zeros_like)
            found |= {names[id(original)]: part.state.get(h, {}) for original, h in pairs}
    return found


def example_state(
    optimizer: torch.optim.Optimizer, stages: Iterable[StageWeights], names: Names
) -> tuple[Beside, dict[str, dict[str, Any]]] | None:
    """What the optimizer would keep after its first step, in kind: of some parameters, and beside.

    The step is made on small pieces of a few parameters, at any time. None if that fails.

    Raises:
        TypeError: its ``state_dict`` does not give parameters' states and all else apart.
    """
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    taken = collections.Counter[tuple[int, int]]()  # by group and dimensions
    for stage in stages:
        for i, original in enumerate(stage.originals):
            key = (group_of.get(id(original), -1), original.dim())
            if key[0] >= 0 and taken[key] < 2 and stage.engine.owns(i):
                taken[key] += 1
                weight = stage.engine.weight(stage.engine.newest_slot, i)
                piece = weight[(slice(0, 4),) * weight.dim()]
                master = piece.to(stage.stepped_dtypes()[i], copy=True)
                pairs.append((original, nn.Parameter(master)))
    restriction = Restriction(pairs, has_states=False)
    try:
        part = _stepped(optimizer, restriction, torch.clone)
    except Exception:  # the first save will tell
        return None
    restriction.check_kept(part)
    state = {names[id(original)]: part.state.get(h, {}) for original, h in pairs}
    beside = beside_states(part)
    try:  # a stage of other parameters may have to go on with it
        set_beside(Restriction(pairs[:1], has_states=False).of(optimizer), beside)
    except Exception as error:
        raise TypeError(
            f"{type(part).__name__}.load_state_dict(): {type(error).__name__}: {error}: it must "
            f"take {', '.join(others_of(beside))} of its state_dict() for any parameters"
        ) from error
    return beside, state


def _stepped(
    optimizer: torch.optim.Optimizer,
    restriction: Restriction,
    gradient: Callable[[torch.Tensor], torch.Tensor],
) -> torch.optim.Optimizer:
    """The restricted optimizer after a step, of which the original and its hooks hear nothing."""
    for handle in restriction.handles:
        handle.grad = gradient(handle.detach())
    part = restriction.of(optimizer)
    hooks = {name: type(value)() for name, value in vars(part).items() if name in _STEP_HOOKS}
    vars(part).update(hooks)
    type(part).step(part)
    return part


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
