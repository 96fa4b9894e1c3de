"""The optimizers that a PipelineOptimizer wraps: how stages step them, and what is saved."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..ranks.operations import Operation
from ..runtime.extension import Extension, Kept, TakenBack, joined, parted, saved_by
from ..runtime.session import Session
from ..runtime.stage_values import masters_shown
from ..runtime.stage_weights import StageWeights
from .checks import stepping
from .clipping import GradNorm
from .fused import Holder, Holders, fused_kind, parameters_of, read_state, step_hooks, write_state
from .own_step import StageStepper, changed_by
from .restriction import example_state, first_states, options_of
from .shares import all_shares, forget_others, whole_states
from .state_by_name import (
    STAGES,
    BesideByPart,
    OptimizerSnapshot,
    SharedState,
    StateByName,
    as_state_dict,
    is_any,
    state_of_all,
    states_of_each,
)
from .step_remedies import StepRemedies

_NOT_BEGUN = "made no step yet: call init_state() before torch.distributed.checkpoint.load()"
"""A key that no saved state has, so that loading it fails, which else would load nothing."""


def _mark(value: Any) -> tuple[Any, int]:
    """Tells an entry of a state from another one. A step count is a copy, not to be written to."""
    is_count = isinstance(value, torch.Tensor) and value.dim() == 0
    return id(value), value._version if is_count else 0


class Wrapped(Extension):
    """The optimizers of one pipeline, as their user made them, and what of them is saved.

    Args:
        extensions: all of the optimizer's, the remedies among them.

    Attributes:
        kinds: of each optimizer the fused pass that computes it; None: its own step.
        steppers: of those with their own step, by number and stage.
        seen: their groups' options as the last step saw them, by number.
        first_step: the batch of the first step; -1: it was before; None: there was none.
        grad_norm: of the last step; None: it was discarded, there was none, or it is not measured.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[torch.optim.Optimizer],
        extensions: Sequence[Extension],
        *,
        remedies: StepRemedies,
        scale: _C.LossScale | None,
    ) -> None:
        self._session, self._extensions = session, extensions
        self._remedies, self._scale = remedies, scale
        self.optimizers = optimizers
        self.weights = [stage.weights for stage in session.stages]
        self.kinds = [
            fused_kind(each.optimizer, each.dtypes) for each in stepping(session, optimizers)
        ]
        states = [
            o.state[key] for o in optimizers for key in o.state if isinstance(key, torch.Tensor)
        ]
        self.first_step = -1 if any(states) else None
        self._room: list[StateByName] = []  # for what is to be loaded, of each
        self._room_beside: dict[int, BesideByPart] = {}  # the same, for what _beside() gives
        self._changing: set[int] = set()  # the numbers of those that change their groups' options
        self._num_hooks = self._count_hooks()
        self._sizes = self._count_parameters()
        self._shown: dict[int, dict[str, tuple[Any, int]]] = {}  # by the parameter's id
        self.grad_norm: GradNorm | None = None

    def _count_hooks(self) -> list[int]:
        return [len(step_hooks(each)) for each in self.optimizers]

    def _count_parameters(self) -> list[int]:
        return [len(group["params"]) for each in self.optimizers for group in each.param_groups]

    def show_states(self) -> None:
        """Puts what the fused passes keep into the optimizers' states. Drained."""
        where = {
            id(handle): (weights, i)
            for weights in self.weights
            for i, handle in enumerate(weights.handles if weights.is_shown else ())
        }
        for kind, optimizer, group in self.groups():
            for parameter in group["params"]:
                if kind is not None and id(parameter) in where:
                    weights, i = where[id(parameter)]
                    if weights.engine.owns(i):
                        optimizer.state[parameter] = read_state(kind, weights, i, group)
        for kind, optimizer in zip(self.kinds, self.optimizers, strict=True):
            for parameter, state in optimizer.state.items() if kind is not None else ():
                self._shown[id(parameter)] = {key: _mark(state[key]) for key in state}

    def take_states(self) -> None:
        """Gives the fused passes what is in the optimizers' states. Drained."""
        holders = self.holders()
        for weights in self.weights:
            for i, original in enumerate(weights.originals):
                kind, optimizer, _ = holders[id(original)]
                if kind is not None and weights.engine.owns(i):
                    write_state(kind, weights, i, optimizer.state.get(original, {}))
        self.show_states()

    def set_fused(self, weights: StageWeights, holders: Holders) -> None:
        """Makes the engine's fused passes step a stage's weights as these optimizers do."""
        numbers = {id(group): number for number, (_, _, group) in enumerate(self.groups())}
        of_stage = [holders[id(original)] for original in weights.originals]
        places = [(kind, numbers[id(group)]) for kind, _, group in of_stage]
        weights.engine.set_optimizers(
            {
                fused: [group if kind == fused else -1 for kind, group in places]
                for fused in self.kinds
                if fused is not None
            }
        )

    def check_unchanged(self) -> None:
        """Raises ValueError if the script has changed what a step would not see."""
        if self._sizes != self._count_parameters():
            raise ValueError(
                f"parameters by group: {self._count_parameters()}, when the PipelineOptimizer was "
                f"made: {self._sizes}: make a new one over the changed optimizers"
            )
        if self._num_hooks != self._count_hooks():
            raise ValueError(
                "hooks of an optimizer's step were registered or removed after the "
                "PipelineOptimizer was made: make a new one over the changed optimizers"
            )
        for kind, optimizer in zip(self.kinds, self.optimizers, strict=True):
            for parameter, state in optimizer.state.items() if kind is not None else ():
                marks = {key: _mark(state[key]) for key in state}
                if marks != self._shown.get(id(parameter), {}):
                    raise ValueError(
                        f"state of {type(optimizer).__name__} was changed for a parameter of shape "
                        f"{list(parameter.shape)}: the stages keep it. Write to its tensors in "
                        "place after opt.state_dict(), or call opt.load_state_dict()"
                    )

    def make_steppers(self, beside: Mapping[int, BesideByPart]) -> None:
        """Makes them anew, with the optimizers' options and state as they are.

        Args:
            beside: what their stages are to go on with, by number.
        """
        self.seen = self.own_options()
        self._changing.update(beside)
        self.steppers = {
            (number, weights.index): StageStepper(self.optimizers[number], weights)
            for number in self.seen
            for weights in self.weights
        }
        for (number, _), stepper in self.steppers.items():
            stepper.go_on(beside.get(number, {}))

    def _beside(self) -> dict[int, BesideByPart]:
        """By number, what the optimizers' stages keep beside their parameters' states, if anything.

        Drained, and after :meth:`read_counters`.
        """
        if self._room_beside:
            return self._room_beside
        given = self.own_options()
        found: dict[int, BesideByPart] = {}
        for number, options in given.items():
            of_stages = self._of_stages(number, options, self.seen[number])
            changed = number in self._changing
            if of_stages and (changed or any(is_any(each, options) for each in of_stages.values())):
                found[number] = of_stages
        return found

    def _of_stages(self, number: int, given: Any, seen: Any) -> BesideByPart:
        of_each = [
            self.steppers[number, weights.index].beside(given, seen) for weights in self.weights
        ]
        return {name: beside for of_stage in of_each for name, beside in of_stage.items()}

    def own_options(self) -> dict[int, Any]:
        """The present options of the optimizers with their own step."""
        return {
            number: options_of(optimizer.param_groups)
            for number, optimizer in enumerate(self.optimizers)
            if self.kinds[number] is None
        }

    def groups(self) -> Iterator[Holder]:
        """Every group as it is now, with its optimizer and the fused pass that computes that."""
        for kind, optimizer in zip(self.kinds, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                yield kind, optimizer, group

    def holders(self) -> dict[int, Holder]:
        """What holds each parameter, by its id: see :meth:`groups`."""
        return {id(parameter): each for each in self.groups() for parameter in each[2]["params"]}

    def stepped(self, batch: int, options: dict[int, Any]) -> None:
        """A batch's step was registered, with these options."""
        self.seen, self._room, self._room_beside = options, [], {}
        self.first_step = batch if self.first_step is None else self.first_step

    def taken_back(self, taken: TakenBack) -> None:
        """Some steps have not been; what the user has changed in the groups since stays."""
        self.grad_norm = None
        if self.first_step is not None and self.first_step >= taken.batch:
            self.first_step = None
        for stepper in self.steppers.values():
            stepper.take_back(taken.batch)

    def read_counters(self) -> None:
        """Takes over what the stages' optimizers changed in their groups; all are drained."""
        for number, seen_by_group in self.seen.items():
            steppers = [self.steppers[number, weights.index] for weights in self.weights]
            stepper = next((each for each in steppers if not each.is_empty), steppers[0])
            groups = self.optimizers[number].param_groups
            changes = changed_by(stepper.options(), groups, seen_by_group)
            if any(changes):
                self._changing.add(number)
            for group, seen, changed in zip(groups, seen_by_group, changes, strict=True):
                group.update(changed)
                seen.update(copy.deepcopy(changed))

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PipelineOptimizer.state_dict`."""
        session = self._session
        session.flush_to_read(Operation.optimizer_state_dict)
        self.show_states()
        self.read_counters()
        beside, holders = self._beside(), self.holders()
        with whole_states(session, self.weights, holders, self.steppers):
            result = state_of_all(self.optimizers, self._names(), self._room, beside)
        if not self._room and self.first_step is None:
            result[_NOT_BEGUN] = True
        if self._scale is not None:
            result["loss_scale"] = {  # as in GradScaler.state_dict()
                "scale": self._scale.of_version(session.accumulation.num_updates),
                "_growth_tracker": self._scale.growth_tracker,
            }
        for extension in self._that_keep():
            kept: Kept = {}
            for weights in self.weights:
                kept |= self._whole(weights, extension.kept(weights))
            result[extension.name] = {**(saved_by(extension) or {}), "kept": joined(kept)}
        return result

    def init_state(self) -> None:
        """See :meth:`PipelineOptimizer.init_state`."""
        remedies = self._remedies
        for extension in self._that_keep():
            is_known = extension.is_known_before_steps
            if not is_known and (extension is not remedies or remedies.remedies.correction):
                raise ValueError(
                    f"init_state: {extension.name}: {extension}: its state cannot be known before "
                    "it is loaded; pipedream2bw.load() can load it"
                )
        self._session.flush_for(Operation.optimizer_state_dict)
        if self.first_step is not None:
            return
        names = self._names()
        self._room = [first_states(each, self.weights, names) for each in self.optimizers]
        for number, options in self.own_options().items():
            example = example_state(self.optimizers[number], self.weights, names)
            if example is not None and is_any(example[0], options):
                self._room_beside[number] = {
                    name: {**copy.deepcopy(example[0]), "params": each["params"]}
                    for name, each in self._of_stages(number, options, options).items()
                }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or a stock optimizer's gave. Drained."""
        known = self._session.local_model.persistent_names()
        states = states_of_each(state_dict, self.optimizers, self._names(), known)
        self.first_step, self._room, self._room_beside = -1, [], {}
        on_host = self._session.stages.options.optimizer_on_host
        _load_states(self.optimizers, states, self.weights, on_host=on_host)
        if self._scale is not None and "loss_scale" in state_dict:
            version, scale = self._session.accumulation.num_updates, state_dict["loss_scale"]
            self._scale.set(version, float(scale["scale"]), int(scale["_growth_tracker"]))
        given = [state_dict] if len(states) == 1 else state_dict["optimizers"]
        self.make_steppers(
            {number: each[STAGES] for number, each in enumerate(given) if STAGES in each}
        )
        for extension in self._extensions:
            state = state_dict.get(extension.name)
            kept = {} if state is None else parted(state["kept"])
            extension.load(state, kept, self.weights)
        self.take_states()
        forget_others(self.holders(), self.weights)

    def examples(self) -> dict[str, Any]:
        """What checkpoints will have of each optimizer that steps by itself, in kind."""
        names = self._names()
        found: dict[str, Any] = {}
        for optimizer in (self.optimizers[number] for number in self.seen):
            beside, state = example_state(optimizer, self.weights, names) or ({}, {})
            found[type(optimizer).__name__] = {"beside": beside, "state": state}
        return found

    def snapshot(self) -> OptimizerSnapshot:
        """What the last step will leave, to be read when every stage has made it."""
        extensions = [each for each in self._extensions if saved_by(each) is not None]
        return OptimizerSnapshot(
            optimizers=self.optimizers,
            holders=self.holders(),
            options=[options_of(optimizer.param_groups) for optimizer in self.optimizers],
            seen=self.seen,
            steppers=self.steppers,
            extensions=extensions,
            saved={each.name: saved_by(each) or {} for each in extensions},
            scale=self._scale,
            staleness=str(self._remedies.remedies),
            names=self._names(),
        )

    def load_snapshot(self, shared: SharedState, states: StateByName) -> None:
        """Goes on where a snapshot was made, with this process's part of the state. Drained."""
        self.load_state_dict(as_state_dict(shared, states, self._session.local_model.tied_names()))
        for version, scale in sorted(shared["loss_scales"].items()):
            assert self._scale is not None
            self._scale.set(version, scale, shared["growth_tracker"])

    def _that_keep(self) -> list[Extension]:
        """The extensions whose state is saved: of remedies only where there are any."""
        kept = [each for each in self._extensions if saved_by(each) is not None]
        return [each for each in kept if each is not self._remedies or self._remedies.remedies]

    def _whole(self, weights: StageWeights, kept: Kept) -> Kept:
        """Copies of what is kept of a stage, with what other replicas keep of it."""
        if weights.engine.is_shared and not self._session.ending.has_failed:
            return all_shares(self._session, weights, kept)
        return {
            name: {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in of_one.items()
            }
            for name, of_one in kept.items()
        }

    def _names(self) -> dict[int, str]:
        """This process's parameters' names, by id."""
        return {id(p): name for name, p in self._session.local_model.named_parameters()}


def _load_states(
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
    with masters_shown(stages):  # torch gives moments their parameters' dtypes
        for optimizer, theirs in zip(optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(theirs)
