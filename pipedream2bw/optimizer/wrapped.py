"""The optimizers that a PipelineOptimizer wraps, and what steps them on each stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..runtime.extension import Extension, TakenBack
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .checks import stepping
from .clipping import GradNorm
from .fused import Holder, fused_kind, step_hooks
from .fused_state import show_states, take_states
from .own_step import StageStepper, changed_by
from .restriction import Names, example_state, first_states, options_of
from .state_by_name import BesideByPart, StateByName, is_any, states_on


def _mark(value: Any) -> tuple[Any, int]:
    """Tells an entry of a state from another one. A step count is a copy, not to be written to."""
    is_count = isinstance(value, torch.Tensor) and value.dim() == 0
    return id(value), value._version if is_count else 0


class Wrapped(Extension):
    """The optimizers of one pipeline, as their user made them.

    Attributes:
        kinds: of each optimizer the fused pass that computes it; None: its own step.
        steppers: of those with their own step, by number and stage.
        seen: their groups' options as the last step saw them, by number.
        first_step: the batch of the first step; -1: it was before; None: there was none.
        room: for what is to be loaded, of each.
        room_beside: the same, for what :meth:`beside` gives.
        grad_norm: of the last step; None: it was discarded, there was none, or it is not measured.
    """

    def __init__(self, session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.weights = [stage.weights for stage in session.stages]
        self.kinds = [
            fused_kind(each.optimizer, each.dtypes) for each in stepping(session, optimizers)
        ]
        states = [
            o.state[key] for o in optimizers for key in o.state if isinstance(key, torch.Tensor)
        ]
        self.first_step = -1 if any(states) else None
        self.room: list[StateByName] = []
        self.room_beside: dict[int, BesideByPart] = {}
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
        show_states(self.groups(), self.weights)
        for kind, optimizer in zip(self.kinds, self.optimizers, strict=True):
            for parameter, state in optimizer.state.items() if kind is not None else ():
                self._shown[id(parameter)] = {key: _mark(state[key]) for key in state}

    def take_states(self) -> None:
        """Gives the fused passes what is in the optimizers' states. Drained."""
        take_states(self.holders(), self.weights)
        self.show_states()

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

    def make_steppers(self, beside: Mapping[int, BesideByPart] = MappingProxyType({})) -> None:
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

    def states_on(self, weights: StageWeights) -> dict[int, dict[str, Any]]:
        """What is kept of the parameters that this replica steps on a stage, live. Drained."""
        return states_on(weights, self.holders(), self.steppers)

    def beside(self) -> dict[int, BesideByPart]:
        """By number, what the optimizers' stages keep beside their parameters' states, if anything.

        Drained, and after :meth:`read_counters`.
        """
        if self.room_beside:
            return self.room_beside
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

    def make_room(self, names: Names) -> None:
        """Makes room for what is to be loaded. Drained."""
        self.room = [first_states(each, self.weights, names) for each in self.optimizers]
        for number, options in self.own_options().items():
            example = example_state(self.optimizers[number], self.weights, names)
            if example is not None and is_any(example[0], options):
                self.room_beside[number] = {
                    name: {**copy.deepcopy(example[0]), "params": each["params"]}
                    for name, each in self._of_stages(number, options, options).items()
                }

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
        self.seen, self.room, self.room_beside = options, [], {}
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
