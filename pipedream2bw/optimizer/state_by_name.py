"""The optimizers' state outside of them, by the parameters' names: in dictionaries, in checkpoints.

Stock optimizers number parameters. Numbers of one process mean nothing to another one, and what
``torch.distributed.checkpoint`` saves is known by its keys: so they are names here. Stock
optimizers load them all the same, as they go by order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..runtime.extension import Extension, joined
from ..runtime.stage_weights import StageWeights
from .fused import Holders, parameters_of, read_state
from .own_step import Steppers, changes
from .restriction import Beside, Names, others_of

STALENESS = "staleness"
"""The name of the remedies for the delay, among those of extensions."""

STAGES = "stages"
"""The key of what stages keep beside their parameters' states, in an optimizer's dictionary."""

StateByName = dict[str, dict[str, Any]]
"""By the parameters' names: what the stock optimizer would have; tensors are the live ones."""

BesideByPart = Mapping[str, Beside]
"""What one optimizer's stages keep beside their parameters' states, by the first name of each."""

SharedState = Mapping[str, Any]
"""What optimizers share, as a checkpoint has it.

``optimizers``: of each the class's name as ``kind``; the options of its ``groups``; the names of
each group's trained parameters as ``members``, in this process or in all; and what its ``stages``
keep beside their parameters' states, if it steps by itself. That has the options that it changed,
which earlier versions wrote into ``groups`` alone. ``staleness``: the remedies for the delay, in
words. ``delayed_batches``: steps since the warm-up. ``loss_scales`` of each version that is read
again, empty without loss scaling. ``growth_tracker``: updates without overflow since the scale last
changed. What each other extension saves beside the parameters' states is under its name.
"""

_NO_EXTENSIONS = ("optimizers", STALENESS, "delayed_batches", "loss_scales", "growth_tracker")


def of_extensions(shared: SharedState) -> dict[str, Mapping[str, Any]]:
    """What each extension has saved, the remedies too, by their names."""
    others = {
        name: saved
        for name, saved in shared.items()
        if name not in _NO_EXTENSIONS and saved is not None
    }
    return {STALENESS: {"delayed_batches": shared["delayed_batches"]}, **others}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSnapshot:
    """What the optimizers hold after the update that makes a version, before the next one.

    Made in the main thread before that; its methods are for the thread that copies the stage.

    Attributes:
        options: those of each optimizer's groups, as its user set them.
        seen: the same after the last step, of those that step by themselves.
        extensions: of the optimizer, those that save anything.
        saved: what each of these saves beside the parameters' states, by its name.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    holders: Holders
    options: Sequence[list[dict[str, Any]]]
    seen: Mapping[int, list[dict[str, Any]]]
    steppers: Steppers
    extensions: Sequence[Extension]
    saved: Mapping[str, Mapping[str, Any]]
    scale: _C.LossScale | None
    staleness: str
    names: Names

    def of_stage(self, weights: StageWeights) -> StateByName:
        """The state of the parameters that count on the stage and that this replica steps.

        What extensions keep is with it.
        """
        states = states_on(weights, self.holders, self.steppers)
        found = {
            name: states[i]
            for i, name in enumerate(weights.trainable)
            if i in states and weights.counts(name)
        }
        for extension in self.extensions:
            for name, of_one in extension.kept(weights).items():
                if name in found:
                    found[name] |= {_name(extension.name, key): v for key, v in of_one.items()}
        return found

    def beside(self, weights: StageWeights, update: int) -> dict[int, BesideByPart]:
        """Copies of what the stage's optimizers keep beside its parameters' states, by number.

        Args:
            update: the last one.
        """
        return {
            number: self.steppers[number, weights.index].beside(self.options[number], seen, update)
            for number, seen in self.seen.items()
        }

    def shared(
        self, beside: Collection[Mapping[int, BesideByPart]], versions: Sequence[int]
    ) -> SharedState:
        """The rest, when each of this process's stages has made the version.

        Args:
            beside: of each of these stages.
            versions: those that are read again.
        """
        optimizers = [
            {
                "kind": type(self.optimizers[number]).__name__,
                "groups": options,
                "members": self._members(self.optimizers[number]),
                STAGES: {k: v for each in beside for k, v in each.get(number, {}).items()},
            }
            for number, options in enumerate(self.options)
        ]
        return {
            **{name: saved for name, saved in self.saved.items() if name != STALENESS},
            "optimizers": optimizers,
            "staleness": self.staleness,
            **self.saved[STALENESS],
            "loss_scales": {v: self.scale.of_version(v) for v in versions} if self.scale else {},
            "growth_tracker": self.scale.growth_tracker if self.scale else 0,
        }

    def _members(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        return [
            [self.names[id(p)] for p in group["params"] if p.requires_grad and id(p) in self.names]
            for group in optimizer.param_groups
        ]

    def check(self, shared: SharedState) -> None:
        """Raises ValueError if these optimizers cannot go on from what others shared."""
        saved = shared["optimizers"]
        theirs = [each["kind"] for each in saved]
        ours = [type(optimizer).__name__ for optimizer in self.optimizers]
        if theirs != ours:
            raise ValueError(
                f"optimizer: {', '.join(ours)}, the checkpoint has {', '.join(theirs)}: they must "
                "be of the same kind; without opt the weights alone are loaded"
            )
        for kind, own, each in zip(ours, self.optimizers, saved, strict=True):
            if len(own.param_groups) != len(each["groups"]):
                raise ValueError(
                    f"param_groups of {kind}: {len(own.param_groups)}, the checkpoint has "
                    f"{len(each['groups'])}: they must be equal"
                )
        places = dict(_places([each["members"] for each in saved]))
        for name, place in _places([self._members(each) for each in self.optimizers]):
            if places.get(name) != place:
                here, there = (
                    f"group {at[1]} of {ours[at[0]]} (optimizer {at[0]})" if at else "none"
                    for at in (place, places.get(name))
                )
                raise ValueError(
                    f"param_groups: {name} is in {here}, the checkpoint has it in {there}: groups "
                    "must have the same parameters"
                )
        if self.staleness != shared["staleness"]:
            raise ValueError(
                f"staleness: {self.staleness}, the checkpoint has {shared['staleness']}"
            )
        saved_by = of_extensions(shared)
        for extension in self.extensions:
            if extension.name in saved_by:
                extension.check_saved(saved_by[extension.name])
        has_scale = self.scale is not None
        if has_scale != bool(shared["loss_scales"]):
            raise ValueError(
                f"loss_scale: {'given' if has_scale else 'None'}, the checkpoint has "
                f"{'one' if shared['loss_scales'] else 'none'}: both must have one, or none"
            )


def _places(members: Sequence[Sequence[Sequence[str]]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parameters of each optimizer's groups, with the numbers of optimizer and group."""
    for number, groups in enumerate(members):
        for group, names in enumerate(groups):
            for name in names:
                yield name, (number, group)


def as_state_dict(
    shared: SharedState, states: StateByName, tied: Mapping[str, str]
) -> dict[str, Any]:
    """What ``PipelineOptimizer.state_dict`` would have given, but for loss scales.

    Args:
        tied: further names of parameters, and the first one of each.
    """
    saved_by = of_extensions(shared)
    by_name: StateByName = {}
    kept: dict[str, StateByName] = {name: {} for name in saved_by}
    for name, state in states.items():
        own = by_name[tied.get(name, name)] = {}
        for key, value in state.items():
            extension, _, rest = key.partition(".")
            if not is_of(key, saved_by):
                own[key] = value
            else:
                kept[extension].setdefault(name, {})[rest] = value
    wholes = []
    for each in shared["optimizers"]:
        of_stages, first = each.get(STAGES, {}), first_beside(each)
        groups = [{**group, "params": []} for group in first["param_groups"]]
        state = {**first["state"], **by_name}
        wholes.append({**others_of(first), "state": state, "param_groups": groups})
        if any(is_any(beside, each["groups"]) for beside in of_stages.values()):
            wholes[-1][STAGES] = of_stages
    whole: dict[str, Any] = wholes[0] if len(wholes) == 1 else {"optimizers": wholes}
    of_each = {name: {**saved, "kept": joined(kept[name])} for name, saved in saved_by.items()}
    return whole | of_each


def _name(extension: str, key: str) -> str:
    """The name, among those of a parameter's state, of what an extension keeps of it."""
    if "/" in key:  # which parts a parameter's name from what is kept of it
        raise ValueError(f"{extension}: kept() has the name {key!r}, it must not have a '/'")
    return STALENESS if extension == STALENESS else f"{extension}.{key}"


def is_of(key: str, extensions: Collection[str]) -> bool:
    """Whether what is saved of a parameter under a name is kept by one of some extensions."""
    name, dot, _ = key.partition(".")
    return key == STALENESS or (bool(dot) and name in extensions)


def is_any(beside: Beside, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether an optimizer keeps anything beside, or has other options than its groups say."""
    keeps = bool(others_of(beside) or beside["state"])
    return keeps or any(changes(beside["param_groups"], groups))


def first_beside(saved: Mapping[str, Any]) -> Beside:
    """What the first stage keeps beside its parameters' states, of one optimizer as saved."""
    groups = saved["groups"]
    none = {"state": {}, "param_groups": groups}
    first = next(iter(saved.get(STAGES, {}).values()), none)
    whole = [{**a, **b} for a, b in zip(groups, first["param_groups"], strict=True)]
    return {**first, "param_groups": whole}


def states_on(
    weights: StageWeights, holders: Holders, steppers: Steppers
) -> dict[int, dict[str, Any]]:
    """What is kept of the parameters that this replica steps on a stage; its tensors are live."""
    own: dict[int, dict[str, Any]] = {}
    for (_, stage), stepper in steppers.items():
        own |= stepper.states() if stage == weights.index else {}
    for i, original in enumerate(weights.originals):
        kind, _, group = holders[id(original)]
        if kind is not None and weights.engine.owns(i):
            own[i] = read_state(kind, weights, i, group)
    return own


def state_of_all(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
    rooms: Sequence[StateByName],
    beside: Mapping[int, BesideByPart],
) -> dict[str, Any]:
    """One dictionary of several optimizers' state, by name.

    Args:
        rooms: of each, in place of its own state; may be empty.
        beside: by number of an optimizer, what its stages keep beside, if anything.
    """
    states = [_with_names(each.state_dict(), each, names) for each in optimizers]
    for state, room in zip(states, rooms, strict=False):
        state["state"] = room
    for number, of_stages in beside.items():
        first = next(iter(of_stages.values()))
        states[number] |= others_of(first) | {STAGES: of_stages}
        states[number]["state"] |= first["state"]
    return states[0] if len(states) == 1 else {"optimizers": states}


def states_of_each(
    state_dict: Mapping[str, Any],
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
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
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Names
) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with names in place of numbers.

    Args:
        names: none of what stands for a process's missing parameters.
    """
    order = enumerate(names.get(id(parameter)) for parameter in parameters_of(optimizer))
    called: dict[Any, str | None] = dict(order)
    state, groups = state_dict["state"], state_dict["param_groups"]
    named = ((called.get(key, key), value) for key, value in state.items())  # some are its own
    return {
        **state_dict,
        "state": {name: value for name, value in named if name is not None},
        "param_groups": [
            {**group, "params": [n for i in group["params"] if (n := called[i]) is not None]}
            for group in groups
        ],
    }


def _with_numbers(
    state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Names,
    known: Collection[str],
) -> dict[str, Any]:
    """What the stock optimizer loads, of a ``state_dict`` with names or with numbers.

    By name each process finds its parameters in the dictionary of any part of the model; what is
    not there begins anew.

    Args:
        known: the whole model's.

    Raises:
        ValueError: a name is none of the model's; another number of groups.
    """
    states, groups = state_dict["state"], state_dict["param_groups"]
    members = [each for group in groups for each in group["params"]]
    others = {key: value for key, value in state_dict.items() if key != STAGES}
    if any(isinstance(key, int) for key in (*states, *members)):
        return others
    if unknown := sorted(set(members).difference(known)):
        raise ValueError(f"state_dict: {', '.join(unknown[:3])}: no parameter of the model")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict: {len(groups)} param_groups, the optimizer has "
            f"{len(optimizer.param_groups)}: they must be equal"
        )
    state = {key: value for key, value in states.items() if key not in known}
    number, packed = 0, []
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        first = number
        for parameter in own["params"]:
            if of_parameter := states.get(names.get(id(parameter), "")):
                state[number] = dict(of_parameter)
            number += 1
        # Of the same groups' members here; where stages were split otherwise there are others.
        options = {
            key: tuple(value) if isinstance(own.get(key), tuple) else value  # JSON has lists
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        packed.append({**options, "params": list(range(first, number))})
    return {**others, "state": state, "param_groups": packed}
