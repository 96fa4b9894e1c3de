"""What a schedule computes, against what it should: a reference that knows no rule of schedules.

Numbers are symbols: a symbol says how a value was computed, down to the initial weights and the
inputs. Two are equal only if they were computed alike, additions in the same order. Ranks run their
lists; messages wait in queues without bounds; backwards read what is in the weights' slot by then.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from tests.samples.schedule_plan import Action, Plan


class Symbols(dict[tuple[object, ...], int]):
    """A number for each way of computing a value."""

    def __call__(self, *how: object) -> int:
        return self.setdefault(how, len(self))


@dataclasses.dataclass
class Results:
    """Losses by microbatch; of each stage the newest weights and the running statistics."""

    losses: list[int]
    weights: list[int]
    statistics: list[int]


def definition(plan: Plan, num_batches: int, symbol: Symbols) -> Results:
    """One microbatch after the other, each stage reading max(t - delay, 0), or t."""
    d, m = plan.num_stages, plan.num_microbatches
    weights = [[symbol("weights", stage)] for stage in range(d)]
    statistics = [symbol("statistics", stage) for stage in range(d)]
    losses = []
    for batch in range(num_batches):
        sums: list[int] = []
        for number in range(batch * m, (batch + 1) * m):
            read = [weights[i][plan.version_read(i, number)] for i in range(d)]
            inputs = [symbol("input", number)]
            for stage in range(d):
                statistics[stage] = symbol("seen", statistics[stage], inputs[-1])
                inputs.append(symbol("F", read[stage], inputs[-1]))
            losses.append(inputs[-1])
            gradient = symbol("seed", inputs[-1])
            of_weights = [0] * d
            for stage in reversed(range(d)):
                of_weights[stage] = symbol("W", read[stage], inputs[stage], gradient)
                gradient = symbol("I", read[stage], inputs[stage], gradient)
            added = zip(sums, of_weights, strict=True) if sums else ()
            sums = [symbol("+", total, new) for total, new in added] or of_weights
        for stage in range(d):
            weights[stage].append(symbol("U", weights[stage][-1], sums[stage]))
    return Results(losses, [versions[-1] for versions in weights], statistics)


@dataclasses.dataclass
class InFlight:
    """A microbatch on a stage: what its forward was given, and its gradient once it is here."""

    given: int
    gradient: int | None = None


class Stage:
    def __init__(self, index: int, num_slots: int, symbol: Symbols) -> None:
        self.slots: list[int | None] = [None] * num_slots
        self.slots[0] = symbol("weights", index)
        self.statistics = symbol("statistics", index)
        self.num_updates = 0
        self.gradient: int | None = None
        self.in_flight: dict[int, InFlight] = {}
        self.inputs: collections.deque[int] = collections.deque()
        self.gradients: collections.deque[int] = collections.deque()


class WrongError(Exception):
    """The schedule is."""


class Execution:
    """Runs of batches, each begun and ended with an empty pipeline."""

    def __init__(self, plan: Plan, symbol: Symbols) -> None:
        if min(plan.versions) < 1 or min(plan.delay) < 0:
            raise WrongError("versions or delay")
        if any(not 0 <= late <= plan.num_microbatches for late in plan.late or []):
            raise WrongError("late forwards")
        kept_and_delay = zip(plan.versions, plan.delay, strict=True)
        if plan.late is not None and any(kept <= delay for kept, delay in kept_and_delay):
            raise WrongError("a stage keeps the versions of its delay, also where none is late")
        self.plan, self.symbol = plan, symbol
        self.stages = [Stage(i, number, symbol) for i, number in enumerate(plan.versions)]
        self.losses: list[int] = []
        self.num_batches = 0

    def results(self) -> Results:
        newest = [stage.slots[stage.num_updates % len(stage.slots)] for stage in self.stages]
        weights = [-1 if weight is None else weight for weight in newest]
        return Results(self.losses, weights, [stage.statistics for stage in self.stages])

    def run(self, num_batches: int) -> None:
        m, first = self.plan.num_microbatches, self.num_batches
        self.num_batches += num_batches
        waiting = []
        for rank, lists in enumerate(self.plan.ranks):
            steps: collections.deque[Action] = collections.deque()
            for batch in range(first, self.num_batches):
                steps += self._numbered(lists[batch > first], batch, first)
            steps += self._numbered(lists[2], self.num_batches - 1, first)
            for stage, _, _ in steps:
                if not 0 <= stage < len(self.stages) or self.plan.placement[stage] != rank:
                    raise WrongError("rank")
            waiting.append(steps)
        moved = True
        while moved:
            moved = False
            for steps in waiting:
                while steps and self._can_do(steps[0]):
                    self._do(steps.popleft())
                    moved = True
        if any(waiting):
            raise WrongError("deadlock")
        for stage in self.stages:
            if stage.in_flight or stage.inputs or stage.gradients or stage.gradient is not None:
                raise WrongError("something is left")
        if len(self.losses) != self.num_batches * m:
            raise WrongError("losses")

    def _numbered(self, actions: Sequence[Action], batch: int, first: int) -> list[Action]:
        m = self.plan.num_microbatches
        numbered = [(stage, kind, batch * m + number) for stage, kind, number in actions]
        return [action for action in numbered if action[2] >= first * m]

    def _can_do(self, action: Action) -> bool:
        stage, kind, _ = action
        if kind == "F":
            return stage == 0 or bool(self.stages[stage].inputs)
        if kind in "BI":
            return stage == len(self.stages) - 1 or bool(self.stages[stage].gradients)
        return True

    def _do(self, action: Action) -> None:
        index, kind, number = action
        stage = self.stages[index]
        if kind == "U":
            self._update(stage, number // self.plan.num_microbatches)
            return
        version = self.plan.version_read(index, number)
        weights = stage.slots[version % len(stage.slots)]
        if kind == "F":
            self._forward(index, number, weights)
            return
        if number not in stage.in_flight:
            raise WrongError("a backward without a forward")
        here = stage.in_flight[number]
        if kind in "BI":
            if here.gradient is not None:
                raise WrongError("a second backward")
            if index == len(self.stages) - 1:
                output = self.symbol("F", weights, here.given)
                here.gradient = self.symbol("seed", output)
            else:
                here.gradient = stage.gradients.popleft()
            if index > 0:
                passed = self.symbol("I", weights, here.given, here.gradient)
                self.stages[index - 1].gradients.append(passed)
        if kind in "BW":
            if here.gradient is None:
                raise WrongError("W before I")
            new = self.symbol("W", weights, here.given, here.gradient)
            is_first = number % self.plan.num_microbatches == 0
            stage.gradient = new if is_first else self.symbol("+", stage.gradient, new)
            del stage.in_flight[number]

    def _forward(self, index: int, number: int, weights: int | None) -> None:
        stage = self.stages[index]
        given = self.symbol("input", number) if index == 0 else stage.inputs.popleft()
        stage.statistics = self.symbol("seen", stage.statistics, given)
        output = self.symbol("F", weights, given)
        if number in stage.in_flight:
            raise WrongError("a second forward")
        stage.in_flight[number] = InFlight(given)
        if index == len(self.stages) - 1:
            self.losses.append(output)
        else:
            self.stages[index + 1].inputs.append(output)

    def _update(self, stage: Stage, batch: int) -> None:
        if batch != stage.num_updates:
            raise WrongError("another batch's update")
        if stage.gradient is None:
            raise WrongError("no gradient")
        newest = stage.slots[stage.num_updates % len(stage.slots)]
        stage.num_updates += 1
        made = self.symbol("U", newest, stage.gradient)
        stage.slots[stage.num_updates % len(stage.slots)] = made
        stage.gradient = None


def why_wrong(plan: Plan, runs: Sequence[int]) -> str | None:
    """What is wrong with the schedule in these runs, None if it computes what it should."""
    symbol = Symbols()
    try:
        execution = Execution(plan, symbol)
        for num_batches in runs:
            execution.run(num_batches)
    except WrongError as wrong:
        return str(wrong)
    if execution.results() != definition(plan, sum(runs), symbol):
        return "results"
    return None
