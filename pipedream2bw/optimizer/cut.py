"""The optimizers' state between two updates, by the parameters' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..runtime.extension import Extension, joined
from ..runtime.stage_weights import StageWeights
from .fused import read_state
from .own_step import StageStepper, changed_by

STALENESS = "staleness"
"""The name of the remedies for the delay, among those of extensions."""

StateByName = dict[str, dict[str, Any]]
"""By the parameters' names: what the stock optimizer would have; tensors are the live ones."""

OwnChanges = Mapping[int, Sequence[Mapping[str, Any]]]
"""By the number of an optimizer that steps by itself: what it changed in each of its groups."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedOptimizer:
    """One of the wrapped optimizers.

    Attributes:
        kind: the class's name.
        groups: the options of its groups, without parameters.
        members: the names of each group's trained parameters, in this process or in all.
        is_empty: whether this process has none of its parameters; then its groups lack what the
            optimizer itself changes there.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[str]]
    is_empty: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedOptimizers:
    """What all of them share.

    Attributes:
        delayed_batches: steps since the warm-up.
        loss_scales: of each version that is read again; empty without loss scaling.
        growth_tracker: updates without overflow since the scale last changed.
        staleness: the remedies for the delay, in words.
        extensions: what the others save beside the parameters' states, by their names.
    """

    optimizers: Sequence[SavedOptimizer]
    staleness: str
    delayed_batches: int
    loss_scales: Mapping[int, float]
    growth_tracker: int
    extensions: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> SavedOptimizers:
        """Reads what :meth:`document` gave."""
        own = {field.name for field in dataclasses.fields(cls)} - {"extensions"}
        fields: dict[str, Any] = {name: document[name] for name in own}
        fields["optimizers"] = [SavedOptimizer(**each) for each in document["optimizers"]]
        others = {n: v for n, v in document.items() if n not in own and v is not None}
        return cls(**fields, extensions=others)

    def document(self) -> dict[str, Any]:
        """As a checkpoint has it: each extension under its name beside the rest."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("extensions"), **fields}

    @property
    def of_all_extensions(self) -> dict[str, Mapping[str, Any]]:
        """What each extension saves, the remedies too, by their names."""
        return {STALENESS: {"delayed_batches": self.delayed_batches}, **self.extensions}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCut:
    """What the optimizers hold after the update that makes a version, before the next one.

    Made in the main thread before that; its methods are for the thread that copies the stage.

    Attributes:
        kinds: the fused pass of each, None of those that step by themselves.
        optimizers: the wrapped ones.
        options: those of each optimizer's groups, as its user set them.
        seen: the same after the last step, of those that step by themselves.
        steppers: these, by number and stage.
        extensions: of the optimizer, those that save anything.
        saved: what each of these saves beside the parameters' states, by its name.
        names: of this process's parameters, by their id.
    """

    kinds: Sequence[str | None]
    optimizers: Sequence[torch.optim.Optimizer]
    options: Sequence[list[dict[str, Any]]]
    seen: Mapping[int, list[dict[str, Any]]]
    steppers: Mapping[tuple[int, int], StageStepper]
    extensions: Sequence[Extension]
    saved: Mapping[str, Mapping[str, Any]]
    scale: _C.LossScale | None
    staleness: str
    names: Mapping[int, str]

    def of_stage(self, weights: StageWeights) -> StateByName:
        """The state of the parameters that count on the stage and that this replica steps.

        What extensions keep is with it.
        """
        found: StateByName = {}
        holders = {
            id(parameter): (kind, optimizer, group)
            for kind, optimizer in zip(self.kinds, self.optimizers, strict=True)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for i, (name, handle) in enumerate(weights.trainable.items()):
            if weights.is_shown and weights.counts(name) and weights.engine.owns(i):
                kind, optimizer, group = holders[id(handle)]
                of_own = optimizer.state.get(handle, {})
                found[name] = read_state(kind, weights, i, group) if kind else dict(of_own)
        for extension in self.extensions:
            for name, of_one in extension.kept(weights).items():
                if name in found:
                    found[name] |= {_name(extension.name, key): v for key, v in of_one.items()}
        return found

    def own_changes(self, weights: StageWeights) -> OwnChanges:
        """What the optimizers that step by themselves changed in their groups, as the stage has it.

        Of those that have a parameter on the stage.
        """
        steppers = {number: self.steppers[number, weights.index] for number in self.seen}
        return {
            number: changed_by(stepper.current_options(), self.options[number], self.seen[number])
            for number, stepper in steppers.items()
            if not stepper.is_empty
        }

    def shared(self, own_changes: Sequence[OwnChanges], versions: Sequence[int]) -> SavedOptimizers:
        """The rest, when each of this process's stages has made the version.

        Args:
            own_changes: on each of these stages; what one has of an optimizer, all have.
            versions: those that are read again.
        """
        optimizers = []
        for number, options in enumerate(self.options):
            changed = next((each[number] for each in own_changes if number in each), None)
            optimizers.append(
                SavedOptimizer(
                    kind=type(self.optimizers[number]).__name__,
                    groups=[
                        {**a, **b}
                        for a, b in zip(options, changed or [{}] * len(options), strict=True)
                    ],
                    members=self._members(self.optimizers[number]),
                    is_empty=number in self.seen and changed is None,
                )
            )
        return SavedOptimizers(
            optimizers=optimizers,
            **self.saved[STALENESS],
            staleness=self.staleness,
            extensions={name: of for name, of in self.saved.items() if name != STALENESS},
            loss_scales={v: self.scale.of_version(v) for v in versions} if self.scale else {},
            growth_tracker=self.scale.growth_tracker if self.scale else 0,
        )

    def _members(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        return [
            [self.names[id(p)] for p in group["params"] if p.requires_grad and id(p) in self.names]
            for group in optimizer.param_groups
        ]

    def check(self, saved: SavedOptimizers) -> None:
        """Raises ValueError if these optimizers cannot go on from the saved ones, of all ranks."""
        theirs = [each.kind for each in saved.optimizers]
        ours = [type(optimizer).__name__ for optimizer in self.optimizers]
        if theirs != ours:
            raise ValueError(
                f"optimizer: {', '.join(ours)}, the checkpoint has {', '.join(theirs)}: they must "
                "be of the same kind; without opt the weights alone are loaded"
            )
        for kind, own, each in zip(ours, self.optimizers, saved.optimizers, strict=True):
            if len(own.param_groups) != len(each.groups):
                raise ValueError(
                    f"param_groups of {kind}: {len(own.param_groups)}, the checkpoint has "
                    f"{len(each.groups)}: they must be equal"
                )
        places = dict(_places([each.members for each in saved.optimizers]))
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
        if self.staleness != saved.staleness:
            raise ValueError(f"staleness: {self.staleness}, the checkpoint has {saved.staleness}")
        for extension in self.extensions:
            if extension.name in saved.extensions:
                extension.check_saved(saved.extensions[extension.name])
        has_scale = self.scale is not None
        if has_scale != bool(saved.loss_scales):
            raise ValueError(
                f"loss_scale: {'given' if has_scale else 'None'}, the checkpoint has "
                f"{'one' if saved.loss_scales else 'none'}: both must have one, or none"
            )


def _places(members: Sequence[Sequence[Sequence[str]]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parameters of each optimizer's groups, with the numbers of optimizer and group."""
    for number, groups in enumerate(members):
        for group, names in enumerate(groups):
            for name in names:
                yield name, (number, group)


def as_state_dict(
    saved: SavedOptimizers, states: StateByName, tied: Mapping[str, str]
) -> dict[str, Any]:
    """What ``PipelineOptimizer.state_dict`` would have given, but for loss scales.

    Args:
        tied: further names of parameters, and the first one of each.
    """
    beside = saved.of_all_extensions
    by_name = {
        tied.get(name, name): {key: v for key, v in state.items() if not is_of(key, beside)}
        for name, state in states.items()
    }
    wholes: list[dict[str, Any]] = [
        {"state": by_name, "param_groups": [{**group, "params": []} for group in each.groups]}
        for each in saved.optimizers
    ]
    whole: dict[str, Any] = wholes[0] if len(wholes) == 1 else {"optimizers": wholes}
    for extension, of_all in beside.items():
        kept = {}
        for name, state in states.items():
            mine = {
                key[len(extension) + 1 :]: value
                for key, value in state.items()
                if is_of(key, (extension,))
            }
            if mine:
                kept[name] = mine
        whole[extension] = {**of_all, "kept": joined(kept)}
    return whole


def _name(extension: str, key: str) -> str:
    """The name, among those of a parameter's state, of what an extension keeps of it."""
    if "/" in key:  # which parts a parameter's name from what is kept of it
        raise ValueError(f"{extension}: kept() has the name {key!r}, it must not have a '/'")
    return STALENESS if extension == STALENESS else f"{extension}.{key}"


def is_of(key: str, extensions: Collection[str]) -> bool:
    """Whether what is saved of a parameter under a name is kept by one of some extensions."""
    name, dot, _ = key.partition(".")
    return key == STALENESS or (bool(dot) and name in extensions)


def as_torch_has_it(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    states: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The ``state_dict`` that the optimizer would have given.

    Args:
        names: of the parameters, by their id.
        states: by name.
        groups: options.
    """
    number, state, packed = 0, {}, []
    for own, options in zip(optimizer.param_groups, groups, strict=True):
        first = number
        for parameter in own["params"]:
            of_parameter = states.get(names.get(id(parameter), ""), {})
            if of_parameter:
                state[number] = dict(of_parameter)
            number += 1
        types = {key: type(value) for key, value in own.items()}
        restored = {
            key: tuple(value) if types.get(key) is tuple else value
            for key, value in options.items()
        }
        packed.append({**restored, "params": list(range(first, number))})
    return {"state": state, "param_groups": packed}
