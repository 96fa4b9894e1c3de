"""Any optimizer's own step, for one stage, and what it and its user change in its groups."""

from __future__ import annotations

import collections
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..runtime.extension import Extension, Update
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .fused import parameters_of
from .restriction import Beside, Restriction, beside_states, options_of, set_beside

log = logging.getLogger("pipedream2bw")


class _Part(NamedTuple):
    """Parameters of a stage that are stepped together, by their positions and names."""

    positions: Sequence[int]
    names: Sequence[str]
    restriction: Restriction
    optimizer: torch.optim.Optimizer


class StageStepper:
    """Runs an optimizer's own step on its parameters of one stage.

    Parameters that the same other stages hold are stepped apart from the stage's own: their copies
    stay equal also where an optimizer combines values over the parameters that it is given.

    Attributes:
        is_empty: whether the optimizer has no parameter on this stage.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stage: StageWeights) -> None:
        self._stage = stage
        given, names = set(map(id, parameters_of(optimizer))), list(stage.trainable)
        positions: dict[tuple[int, ...], list[int]] = {(stage.index_in_model,): []}
        for i, name in enumerate(names):
            if id(stage.originals[i]) in given and stage.engine.owns(i):
                positions.setdefault(stage.stages_of(name), []).append(i)
        self._parts: list[_Part] = []
        for those in positions.values():
            if those or len(positions) == 1:
                pairs = [(stage.originals[i], stage.handles[i]) for i in those]
                restriction, own = Restriction(pairs), [names[i] for i in those]
                self._parts.append(_Part(those, own, restriction, restriction.of(optimizer)))
        self.is_empty = not self._parts[0].positions
        stage.handles_step |= not self.is_empty
        # By update, not yet made: an update whose gradients overflowed leaves them to the next.
        self._changes: collections.deque[tuple[int, list[dict[str, Any]]]] = collections.deque()

    def options(self) -> list[dict[str, Any]]:
        """Its groups' options, which it may have changed itself. The pipeline must be drained."""
        self._make_changes()
        return options_of(self._parts[0].optimizer.param_groups)

    def states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of the stage's parameters, by their positions; live."""
        handles = self._stage.handles
        return {
            i: dict(part.optimizer.state.get(handles[i], {}))
            for part in self._parts
            for i in part.positions
        }

    def beside(
        self,
        given: Sequence[dict[str, Any]],
        seen: Sequence[dict[str, Any]],
        update: int | None = None,
    ) -> dict[str, Beside]:
        """Copies of what it keeps beside that, by the first of each part's parameters.

        Args:
            given, seen: see :func:`changed_by`.
            update: the last one, which may have been left out; None: drained.
        """
        self._make_changes(update)
        found: dict[str, Beside] = {}
        for part in self._parts if not self.is_empty else ():
            each = {**beside_states(part.optimizer), "params": part.names}
            theirs = zip(each["param_groups"], changes(given, seen), strict=True)
            each["param_groups"] = [{**group, **changed} for group, changed in theirs]
            found[part.names[0]] = each
        return found

    def go_on(self, beside: Mapping[str, Beside]) -> None:
        """Goes on with what :meth:`beside` gave: a part with that of its first parameter."""
        for part in self._parts:
            mine = {n: each for each in beside.values() for n in each["params"] if n in part.names}
            if self.is_empty or part.names[0] not in mine:
                continue
            first = mine[part.names[0]]
            set_beside(part.optimizer, first)
            others = [each for each in mine.values() if each is not first]
            if any(differ({**first, "params": 0}, {**each, "params": 0}) for each in others):
                log.warning(
                    "%s: stages kept other values beside their parameters' states, and were split "
                    "otherwise: the stage of %s goes on with those of that parameter's",
                    type(part.optimizer).__name__,
                    part.names[0],
                )

    def change(self, update: int, groups: list[dict[str, Any]]) -> None:
        """Before the update of that number: what the user has changed in each group."""
        self._changes.append((update, groups))

    def take_back(self, update: int) -> None:
        """Updates from that number on have not been; what the user has changed stays."""
        self._changes = collections.deque(
            (min(number, update), groups) for number, groups in self._changes
        )

    def _make_changes(self, update: int | None = None) -> None:
        while self._changes and (update is None or self._changes[0][0] <= update):
            _, groups = self._changes.popleft()
            for part in self._parts:
                for group, options in zip(part.optimizer.param_groups, groups, strict=True):
                    group.update(options)

    def step(self, update: int, slot: int, divisor: float) -> None:
        """One step of the weights in a slot; called by the thread of the stage's updates."""
        self._make_changes(update)
        for part in self._parts if not self.is_empty else ():
            self._step_part(part, slot, divisor)

    def _step_part(self, part: _Part, slot: int, divisor: float) -> None:
        engine, optimizer = self._stage.engine, part.optimizer
        handles = [self._stage.handles[i] for i in part.positions]
        self._stage.check_unwritten(handles)
        outside = [(handle.data, handle.grad) for handle in handles]
        for i, handle in zip(part.positions, handles, strict=True):
            handle.data = engine.master(slot, i)
            gradient = engine.gradient(i).to(handle.dtype) if engine.has_gradient(i) else None
            handle.grad = gradient
        try:
            with part.restriction.states_shared(), _divided_lr(optimizer.param_groups, divisor):
                type(optimizer).step(optimizer)
        finally:
            for handle, (data, gradient) in zip(handles, outside, strict=True):
                handle.grad = None  # one of another dtype is of no tensor
                handle.data, handle.grad = data, gradient
        self._written(part, slot)

    def call(self, name: str) -> None:
        """Calls the method of that name, if the optimizer has it. The pipeline must be drained."""
        self._make_changes()
        for part in self._parts:
            method = getattr(type(part.optimizer), name, None)
            if method is not None:
                with part.restriction.states_shared():
                    method(part.optimizer)
                self._written(part, self._stage.engine.newest_slot)

    def _written(self, part: _Part, slot: int) -> None:
        """The optimizer has written to its weights in a slot, or to the masters they round to."""
        engine = self._stage.engine
        self._stage.note_stepped(self._stage.handles[i] for i in part.positions)
        with torch.no_grad():
            for i in part.positions:
                weight, master = engine.weight(slot, i), engine.master(slot, i)
                if weight.dtype != master.dtype:
                    weight.copy_(master)


Steppers = Mapping[tuple[int, int], StageStepper]
"""The steppers of several optimizers, by the optimizer's number and the stage."""


def steps_in(
    update: Update,
    steppers: Sequence[StageStepper],
    divisor: float,
    extensions: Sequence[Extension],
) -> Callable[[int], None] | None:
    """Makes what a stage does in an update beside the fused pass, given its weights' slot.

    It holds no pipeline, as it waits in the engine. None: there is nothing to do.
    """
    acting = [extension for extension in extensions if extension.acts_in(update)]
    if not acting and not steppers:
        return None

    def steps(slot: int) -> None:
        for extension in acting:
            extension.before_update(update, slot)
        for stepper in steppers:
            stepper.step(update.batch, slot, divisor)
        for extension in acting:
            extension.after_update(update, slot)

    return steps


@contextlib.contextmanager
def _divided_lr(groups: list[dict[str, Any]], divisor: float) -> Iterator[None]:
    if divisor == 1:
        yield
        return
    given = [group["lr"] for group in groups]
    divided = [lr / divisor for lr in given]
    for group, lr in zip(groups, divided, strict=True):
        group["lr"] = lr
    yield
    for group, before, during in zip(groups, given, divided, strict=True):
        if group["lr"] is during:  # else the optimizer has set it
            group["lr"] = before


def changes(
    current: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What the user changed in each group.

    Stages get only this: their optimizers may keep counters in their groups.
    """
    return [
        {key: value for key, value in new.items() if key not in old or differ(value, old[key])}
        for new, old in zip(current, before, strict=True)
    ]


def changed_by(
    theirs: Sequence[dict[str, Any]],
    given: Sequence[dict[str, Any]],
    seen: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """What the optimizer changed in each group, but not where its user has, too.

    Args:
        theirs: the options as the optimizer has them.
        given: as they are for the user.
        seen: as both were when the last step was made.
    """
    both = zip(changes(theirs, seen), changes(given, seen), seen, strict=True)
    return [
        {key: value for key, value in own.items() if key not in before or key not in users}
        for own, users, before in both
    ]


def differ(new: Any, old: Any) -> bool:
    """Whether an option is another one, or a tree of lists, dictionaries and the like is."""
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return not torch.equal(new, old)
    (news, tree), (olds, other) = map(pytree.tree_flatten, (new, old))
    if tree.is_leaf():
        return type(new) is not type(old) or bool(new != old)
    return tree != other or any(map(differ, news, olds))


def keep_from_zeroing(optimizer: torch.optim.Optimizer, session: Session) -> None:
    """Makes ``optimizer.zero_grad()`` do nothing while the pipeline is open.

    Its own step may just compute, in another thread, with the gradients that it would take away.
    """
    optimizer_alive, session_alive = weakref.ref(optimizer), weakref.ref(session)

    def zero_grad(set_to_none: bool = True) -> None:
        mine, its_session = optimizer_alive(), session_alive()
        is_open = its_session is not None and its_session.ending.is_open
        if mine is not None and not is_open:
            type(mine).zero_grad(mine, set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
