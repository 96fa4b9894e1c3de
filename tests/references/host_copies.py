"""When optimizers in the host's memory are done: the longest way through all that waits for it.

Every action, copy and step of a run is a node, what it waits for an edge, and a node begins at the
end of the longest way to it. Nothing is walked through in order of time.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Hashable, Mapping, Sequence

import pipedream2bw as pd2

Node = Hashable


@dataclasses.dataclass(frozen=True)
class Action:
    """What a schedule makes a rank do; an update's microbatch is 0."""

    stage: int
    kind: str
    batch: int
    microbatch: int


class Waits:
    """Nodes and what they wait for: so many seconds after the start of others."""

    def __init__(self) -> None:
        self.before: dict[Node, dict[Node, float]] = {}

    def add(self, node: Node, **after: tuple[Node, float]) -> None:
        """``after``: by any name, a node and the seconds since its start."""
        held = self.before.setdefault(node, {})
        for other, seconds in after.values():
            held[other] = max(held.get(other, 0.0), seconds)
            self.before.setdefault(other, {})

    def starts(self) -> dict[Node, float]:
        times: dict[Node, float] = {}
        for node in graphlib.TopologicalSorter(self.before).static_order():
            waits = self.before[node].items()
            times[node] = max((times[other] + seconds for other, seconds in waits), default=0.0)
        return times


class HostRun:
    """A run of a schedule's lists whose messages take ``latency`` seconds each."""

    def __init__(
        self,
        schedule: pd2.Schedule,
        lists: Sequence[Sequence[Action]],
        costs: Mapping[str, Sequence[float]],
        host: pd2.HostCosts,
        latency: float,
    ) -> None:
        self.schedule, self.costs, self.host = schedule, costs, host
        self.waits, self.latency = Waits(), latency
        self.m, self.d = schedule.num_microbatches, schedule.depth
        self.copies = schedule.num_stages // self.d
        for actions in lists:
            for index, action in enumerate(actions):
                self.waits.add(action)
                if index > 0:
                    before = actions[index - 1]
                    takes = 0.0 if before.kind == "U" else self.seconds(before)
                    self.waits.add(action, rank=(before, takes))
                self.wait_for_messages(action)
                self.wait_for_host(action)
            updates = [action for action in actions if action.kind == "U"]
            for before, update in zip([None, *updates], updates, strict=False):
                self.add_update(update, before, actions)
        self.starts = self.waits.starts()

    def end(self, action: Action) -> float:
        """An update's is that of its last copy up."""
        if action.kind != "U":
            return self.starts[action] + self.seconds(action)
        last = self.host.buckets - 1
        return self.starts["up", action, last] + self.of_bucket("up", action)

    def cost(self, name: str, action: Action) -> float:
        return self.costs[name][action.stage % self.d]

    def seconds(self, action: Action) -> float:
        parts = {"F": ["forward"], "I": ["input_grad"], "W": ["weight_grad"]}
        names = parts.get(action.kind, ["input_grad", "weight_grad"])
        return sum(self.cost(name, action) for name in names)

    def of_bucket(self, engine: str, update: Action) -> float:
        whole = {
            "down": self.cost("gradient_bytes", update) / self.host.down,
            "step": self.cost("update", update),
            "up": self.cost("weight_bytes", update) / self.host.up,
        }
        return whole[engine] / self.host.buckets

    def wait_for_messages(self, action: Action) -> None:
        step = {"F": -1, "B": 1, "I": 1}.get(action.kind, 0)
        sender = action.stage + step
        if step and sender // self.d == action.stage // self.d and sender >= 0:
            kind = action.kind if sender < self.schedule.num_stages else ""
            sent = dataclasses.replace(action, stage=sender, kind=kind)
            if kind:
                placement = self.schedule.placement
                apart = placement[sender] != placement[action.stage]
                seconds = self.seconds(sent) + (self.latency if apart else 0.0)
                self.waits.add(action, message=(sent, seconds))
        if action.kind == "U" and self.copies == 2:
            # Both begin when the later one of them is come to, which is after its backwards.
            self.waits.add(action, copy=(("come", self.twin(action)), 0.0))

    def twin(self, action: Action) -> Action:
        stage = action.stage + (self.d if action.stage < self.d else -self.d)
        return dataclasses.replace(action, stage=stage)

    def wait_for_host(self, action: Action) -> None:
        last = self.host.buckets - 1
        is_late = action.microbatch < self.schedule.late_forwards[action.stage]
        delay = self.schedule.delay[action.stage] * is_late
        made = action.batch - delay - 1
        if action.kind == "F" and made >= 0:
            update = Action(action.stage, "U", made, 0)
            up = self.of_bucket("up", update)
            self.waits.add(action, version=(("up", update, last), up))
        if action.batch == 0:
            return
        before = Action(action.stage, "U", action.batch - 1, 0)
        if action.kind == "U":
            step = self.of_bucket("step", before)
            self.waits.add(action, before=(("step", before, last), step))
        if action.kind in "BI" and action.microbatch == 0 and self.host.one_buffer:
            down = self.of_bucket("down", before)
            self.waits.add(action, buffer=(("down", before, last), down))

    def add_update(self, update: Action, ahead: Action | None, actions: Sequence[Action]) -> None:
        n = self.host.buckets
        index = actions.index(update)
        if index > 0 and self.copies == 2:
            previous = actions[index - 1]
            takes = 0.0 if previous.kind == "U" else self.seconds(previous)
            self.waits.add(("come", update), rank=(previous, takes))
        gives = next(
            each
            for each in reversed(actions)
            if (each.stage, each.batch, each.microbatch) == (update.stage, update.batch, self.m - 1)
            and each.kind in "BW"
        )
        summing = self.cost("all_reduce", update)
        source, lasts = (update, summing) if summing or self.copies == 2 else (gives, -1.0)
        lasts = self.seconds(gives) if lasts < 0 else lasts
        old = Action(update.stage, "U", update.batch - 1, 0) if update.batch else None
        for k in range(n):
            made = lasts * (k + 1) / n
            self.waits.add(("down", update, k), made=(source, made))
            self.waits.add(
                ("step", update, k),
                come=(("down", update, k), self.of_bucket("down", update)),
                summed=(update, summing),
            )
            self.waits.add(
                ("up", update, k),
                stepped=(("step", update, k), self.of_bucket("step", update)),
                freed=(("down", update, n - 1), self.of_bucket("down", update)),
            )
            if old:
                step, up = self.of_bucket("step", old), self.of_bucket("up", old)
                self.waits.add(("down", update, k), stepped=(("step", old, n - 1), step))
                self.waits.add(("step", update, k), left=(("up", old, k), up))
            for engine in ("down", "step", "up"):  # of the rank, one after another
                if k > 0:
                    taken = self.of_bucket(engine, update)
                    self.waits.add((engine, update, k), order=((engine, update, k - 1), taken))
                elif ahead:
                    taken = self.of_bucket(engine, ahead)
                    self.waits.add((engine, update, k), order=((engine, ahead, n - 1), taken))
