"""Any optimizer's own step, for one stage, and what it and its user change in its groups."""

from __future__ import annotations

import collections
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..runtime.extension import Extension, Update
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .fused import parameters_of


class StageStepper:
    """Runs an optimizer's own step on its parameters of one stage.

    Parameters that the same other stages hold are stepped apart from the stage's own: their copies
    stay equal also where an optimizer combines values over the parameters that it is given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stage: StageWeights) -> None:
        given = set(map(id, parameters_of(optimizer)))
        positions: dict[tuple[int, ...], list[int]] = {(stage.index_in_model,): []}
        for i, name in enumerate(stage.trainable):
            if id(stage.originals[i]) in given and stage.engine.owns(i):
                positions.setdefault(stage.stages_of(name), []).append(i)
        self._parts = [_PartStepper(optimizer, stage, those) for those in positions.values()]
        # By update, not yet made: an update whose gradients overflowed leaves them to the next.
        self._changes: collections.deque[tuple[int, list[dict[str, Any]]]] = collections.deque()

    def options(self) -> list[dict[str, Any]]:
        """Its groups' options, which it may have changed itself. The pipeline must be drained."""
        self._make_changes()
        return self.current_options()

    def current_options(self) -> list[dict[str, Any]]:
        """Its groups' options as the last update left them; not while one is under way."""
        part = next((part for part in self._parts if part.positions), self._parts[0])
        return options_of(part.optimizer.param_groups)

    @property
    def is_empty(self) -> bool:
        """Whether the optimizer has no parameter on this stage."""
        return not any(part.positions for part in self._parts)

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
        """One step of the weights in a slot; called by the thread of the stage's updates.

        Args:
            update: its number.
            divisor: of the learning rates.
        """
        self._make_changes(update)
        for part in self._parts:
            part.step(slot, divisor)

    def call(self, name: str) -> None:
        """Calls the method of that name, if the optimizer has it. The pipeline must be drained."""
        self._make_changes()
        for part in self._parts:
            method = getattr(type(part.optimizer), name, None)
            if method is not None:
                method(part.optimizer)
                part.written()


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


class _PartStepper:
    """Steps the parameters at ``positions`` of the stage."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, stage: StageWeights, positions: list[int]
    ) -> None:
        self._stage = stage
        self.positions = positions
        stage.handles_step |= bool(positions)
        pairs = [(stage.originals[i], stage.handles[i]) for i in positions]
        self.optimizer = _Restriction(pairs).of(optimizer)

    def step(self, slot: int, divisor: float) -> None:
        if not self.positions:
            return
        engine = self._stage.engine
        handles = [self._stage.handles[i] for i in self.positions]
        self._stage.check_unwritten(handles)
        outside = [handle.grad for handle in handles]
        for i, handle in zip(self.positions, handles, strict=True):
            handle.data = engine.master(slot, i)
            gradient = engine.gradient(i).to(handle.dtype) if engine.has_gradient(i) else None
            handle.grad = gradient
        try:
            with _divided_lr(self.optimizer.param_groups, divisor):
                type(self.optimizer).step(self.optimizer)
        finally:
            for handle, gradient in zip(handles, outside, strict=True):
                handle.grad = gradient
        self.written(slot)

    def written(self, slot: int | None = None) -> None:
        """The optimizer has written to its weights, or to the masters that they round to.

        Args:
            slot: of these weights; the newest ones' if None.
        """
        engine = self._stage.engine
        self._stage.note_stepped(self._stage.handles[i] for i in self.positions)
        slot = engine.newest_slot if slot is None else slot
        with torch.no_grad():
            for i in self.positions:
                weight, master = engine.weight(slot, i), engine.master(slot, i)
                if weight.dtype != master.dtype:
                    weight.copy_(master)


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


def first_states(
    optimizer: torch.optim.Optimizer, stages: Iterable[StageWeights], names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """What the optimizer would keep after a step without gradients, by the parameters' names.

    Of the right kinds and shapes, but the values are none of the run's. The step is made on copies.

    Args:
        names: by the parameters' id.
    """
    return {
        names[id(original)]: state
        for stage in stages
        for original, state in _first_states(optimizer, stage)
    }


def _first_states(
    optimizer: torch.optim.Optimizer, stage: StageWeights
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    given = set(map(id, parameters_of(optimizer)))
    pairs = []
    for i, original in enumerate(stage.originals if stage.is_shown else ()):
        if id(original) in given:
            master = stage.engine.master(stage.engine.newest_slot, i)
            handle = nn.Parameter(master.detach().clone())
            handle.grad = torch.zeros_like(handle)
            pairs.append((original, handle))
    if pairs:
        part = _Restriction(pairs).of(optimizer)
        type(part).step(part)
        for original, handle in pairs:
            yield original, part.state.get(handle, {})


class _Restriction:
    """An optimizer restricted to some of its parameters; state is shared by parameter."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._pairs = pairs  # a parameter of the optimizer, and what it will step instead
        self._handle_of = {id(original): handle for original, handle in self._pairs}
        self._groups: dict[int, dict[str, Any]] = {}  # by the original's id

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        # Not copy.copy, for which an optimizer has no attributes beyond groups and state.
        part: torch.optim.Optimizer = object.__new__(type(optimizer))
        part.__dict__.update(optimizer.__dict__)
        for name, value in vars(optimizer).items():
            if isinstance(value, torch.optim.Optimizer):  # of which this one is made
                part.__dict__[name] = self.of(value)
        if "param_groups" in vars(optimizer):
            part.param_groups = [self._group(group) for group in optimizer.param_groups]
        is_shown = all(original is handle for original, handle in self._pairs)
        if "state" in vars(optimizer) and not is_shown:
            part.state = self._own_state(optimizer)
        return part

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """One for each of the original's: an optimizer shares them with those it is made of."""
        if id(group) not in self._groups:
            mine = [self._handle_of[id(p)] for p in group["params"] if id(p) in self._handle_of]
            (options,) = options_of([group])
            self._groups[id(group)] = {**options, "params": mine}
        return self._groups[id(group)]

    def _own_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """The state of a copy, which has to stay apart from the first one's."""
        state: collections.defaultdict[nn.Parameter, Any] = collections.defaultdict(dict)
        for original, handle in self._pairs:
            if original in optimizer.state:
                state[handle] = copy.deepcopy(optimizer.state[original])
        return state


def options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of all that the groups have beside their parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in groups
    ]


def changes(current: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the user changed in each group.

    Stages get only this: their optimizers may keep counters in their groups.
    """
    return [
        {key: value for key, value in new.items() if key not in old or differ(value, old[key])}
        for new, old in zip(current, before, strict=True)
    ]


def take_over_counters(
    theirs: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    seen: Sequence[dict[str, Any]],
) -> None:
    """Gives groups, and what was seen of them, what an optimizer changed in its own: see below."""
    for group, before, changed in zip(groups, seen, changed_by(theirs, groups, seen), strict=True):
        group.update(changed)
        before.update(copy.deepcopy(changed))


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
    return [
        {
            key: value
            for key, value in options.items()
            if key not in before
            or (not differ(group[key], before[key]) and differ(value, before[key]))
        }
        for options, group, before in zip(theirs, given, seen, strict=True)
    ]


def differ(new: Any, old: Any) -> bool:
    """Whether an option is another one."""
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return not torch.equal(new, old)
    return type(new) is not type(old) or bool(new != old)


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
