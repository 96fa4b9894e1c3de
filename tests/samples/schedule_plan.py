"""Schedules as plain lists that a test can change, and small changes to them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

Action = tuple[int, str, int]
"""Stage, kind (F, B, I, W or U), microbatch."""

SECTIONS = ("prologue", "steady", "epilogue")


@dataclasses.dataclass
class Plan:
    """The text form, read without the package."""

    num_microbatches: int
    delay: list[int]
    placement: list[int]
    versions: list[int]
    ranks: list[list[list[Action]]]  # by rank: prologue, steady, epilogue
    late: list[int] | None = None  # forwards of each stage that read an older version; None: all

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def version_read(self, stage: int, number: int) -> int:
        """By a forward, of a microbatch counted from the start of training."""
        batch, place = divmod(number, self.num_microbatches)
        is_late = self.late is None or place < self.late[stage]
        return max(batch - self.delay[stage] * is_late, 0)

    @classmethod
    def read(cls, text: str) -> Plan:
        head: dict[str, str] = {}
        rows: dict[str, list[list[Action]]] = {}
        for line in text.splitlines():
            if line.startswith("["):
                rows[line[1:-1]] = []
            elif rows:
                cells = [] if line == "-" else line.split(",")
                list(rows.values())[-1].append([_action(cell) for cell in cells])
            else:
                key, value = line.split(": ")
                head[key] = value

        def numbers(key: str) -> list[int]:
            return [int(number) for number in head[key].split(",")]

        stages = int(head["stages"])
        delay = numbers("delay")
        lists = [list(lists) for lists in zip(*(rows[name] for name in SECTIONS), strict=True)]
        return cls(
            int(head["microbatches"]),
            delay if len(delay) == stages else delay * stages,
            numbers("placement"),
            numbers("versions"),
            lists,
            numbers("late") if "late" in head else None,
        )

    def text(self) -> str:
        def joined(values: list[int]) -> str:
            return ",".join(map(str, values))

        lines = [
            "name: changed",
            f"stages: {self.num_stages}",
            f"microbatches: {self.num_microbatches}",
            f"delay: {joined(self.delay)}",
            *([] if self.late is None else [f"late: {joined(self.late)}"]),
            f"placement: {joined(self.placement)}",
            f"versions: {joined(self.versions)}",
        ]
        for which, name in enumerate(SECTIONS):
            lines.append(f"[{name}]")
            for lists in self.ranks:
                cells = [f"{stage}{kind}{number}" for stage, kind, number in lists[which]]
                lines.append(",".join(cells) or "-")
        return "\n".join(lines) + "\n"

    def batches_behind(self) -> int:
        numbers = [a[2] for lists in self.ranks for actions in lists for a in actions]
        return max(0, -(min([0, *numbers]) // self.num_microbatches))


def _action(cell: str) -> Action:
    at = next(i for i, letter in enumerate(cell) if letter in "FBIWU")
    return int(cell[:at]), cell[at], int(cell[at + 1 :])


@dataclasses.dataclass
class Change:
    """A kind of change, and numbers that say where: any numbers will do."""

    kind: str
    rank: int
    which: int  # of its actions
    where: int
    lists: int  # all of the rank's lists most of the time, else one of them


def changed(plan: Plan, change: Change) -> Plan:
    """A changed copy."""
    plan = copy.deepcopy(plan)
    lists = plan.ranks[change.rank % len(plan.ranks)]
    known = [action for actions in lists for action in actions]
    if known:
        KINDS[change.kind](plan, lists, known[change.which % len(known)], change)
    return plan


def _find(plan: Plan, actions: list[Action], wanted: Action) -> int | None:
    m = plan.num_microbatches
    for at, (stage, kind, number) in enumerate(actions):
        if (stage, kind) == wanted[:2] and (number - wanted[2]) % m == 0:
            return at
    return None


def _places(
    plan: Plan, lists: list[list[Action]], action: Action, change: Change
) -> list[tuple[list[Action], int]]:
    chosen = lists if change.lists % 5 else [lists[change.where % 3]]
    found = [(actions, _find(plan, actions, action)) for actions in chosen]
    return [(actions, at) for actions, at in found if at is not None]


def _swap(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    for actions, at in _places(plan, lists, action, change):
        if at + 1 < len(actions):
            actions[at], actions[at + 1] = actions[at + 1], actions[at]


def _move(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    for actions, at in _places(plan, lists, action, change):
        moved = actions.pop(at)
        actions.insert(change.where % (len(actions) + 1), moved)


def _drop(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    for actions, at in _places(plan, lists, action, change):
        del actions[at]


def _duplicate(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    for actions, at in _places(plan, lists, action, change):
        actions.insert(change.where % (len(actions) + 1), actions[at])


def _edit(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    m = plan.num_microbatches
    for actions, at in _places(plan, lists, action, change):
        stage, kind, number = actions[at]
        actions[at] = [
            (stage, "FBIWU"[change.where % 5], number),
            (change.where % (plan.num_stages + 2) - 1, kind, number),
            (stage, kind, number + (-m, -1, 1, m)[change.where % 4]),
        ][change.lists % 3]


def _postpone(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    """From a batch's own lists to those of the batch after, and the drain's."""
    first, again = (_find(plan, lists[which], action) for which in (0, 1))
    if first is None or again is None:
        return
    lists[2].insert(0 if change.lists % 2 else len(lists[2]), lists[0].pop(first))
    stage, kind, number = lists[1].pop(again)
    late = (stage, kind, number - plan.num_microbatches)
    lists[1].insert(0 if change.lists % 3 else change.where % (len(lists[1]) + 1), late)


def _split(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    stage, _, number = action
    for actions, at in _places(plan, lists, (stage, "B", number), change):
        number = actions[at][2]
        actions[at] = (stage, "I", number)
        later = at + 1 + change.where % (len(actions) - at)
        actions.insert(later, (stage, "W", number))


def _merge(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    stage, _, number = action
    for actions, at in _places(plan, lists, (stage, "I", number), change):
        weights = _find(plan, actions, (stage, "W", number))
        if weights is not None:
            stays, goes = (at, weights) if change.where % 2 else (weights, at)
            actions[stays] = (stage, "B", actions[stays][2])
            del actions[goes]


def _versions(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    stage = change.which % plan.num_stages
    if change.lists % 3 < 2:
        plan.delay[stage] = change.where % 12 - (change.lists % 7 == 0)
    if change.lists % 3 > 0:
        plan.versions[stage] = change.where % 12 + (change.lists % 7 > 0)


def _place(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    plan.placement[change.which % plan.num_stages] = change.where % (len(plan.ranks) + 2) - 1


def _exchange(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    """Two ranks' lists, and most of the time the placement: then only names change."""
    one, other = change.rank % len(plan.ranks), change.where % len(plan.ranks)
    plan.ranks[one], plan.ranks[other] = plan.ranks[other], plan.ranks[one]
    if change.lists % 4:
        name = {one: other, other: one}
        plan.placement = [name.get(rank, rank) for rank in plan.placement]


def _carry(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    """From one list to another, as it is."""
    source = next(actions for actions in lists if action in actions)
    source.remove(action)
    target = lists[change.lists % 3]
    target.insert(change.where % (len(target) + 1), action)


def _late(plan: Plan, lists: list[list[Action]], action: Action, change: Change) -> None:
    if plan.late is None:
        plan.late = [plan.num_microbatches if delay > 0 else 0 for delay in plan.delay]
    stage = change.which % plan.num_stages
    plan.late[stage] = change.where % (plan.num_microbatches + 3) - 1


KINDS: dict[str, Callable[[Plan, list[list[Action]], Action, Change], None]] = {
    "swap": _swap,
    "move": _move,
    "postpone": _postpone,
    "split": _split,
    "merge": _merge,
    "drop": _drop,
    "duplicate": _duplicate,
    "edit": _edit,
    "versions": _versions,
    "place": _place,
    "exchange": _exchange,
    "carry": _carry,
    "late": _late,
}
