"""The time of a schedule whose stages may send to any later one, not only to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.samples.schedule_plan import Action, Plan

Sent = Mapping[tuple[int, int], tuple[float, float, float]]
"""By sending and receiving stage of the model: latency, bandwidth and bytes; gradients go back."""


def unrolled(lists: Sequence[Sequence[Action]], m: int, num_batches: int) -> Iterator[Action]:
    """A rank's actions, microbatches numbered from the run's first."""
    prologue, steady, epilogue = lists
    for batch, actions in enumerate([prologue, *[steady] * (num_batches - 1), epilogue]):
        first = min(batch, num_batches - 1) * m
        for stage, kind, microbatch in actions:
            if first + microbatch >= 0:
                yield stage, kind, first + microbatch


class Run:
    """Ranks go through their lists; whoever waits is looked at again in the next round."""

    def __init__(
        self, lists: Plan, stages: Sequence[Mapping[str, float]], sent: Sent, num_batches: int
    ) -> None:
        self.lists, self.stages, self.sent = lists, stages, sent
        self.m = lists.num_microbatches
        self.arrived: dict[tuple[int, int, int], float] = {}
        self.came: dict[tuple[int, int], float] = {}
        self.updated: dict[tuple[int, int], float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.free = [0.0] * len(lists.ranks)
        self.ends: list[dict[int, float]] = [{} for _ in lists.ranks]
        waiting = [list(unrolled(rank, self.m, num_batches))[::-1] for rank in lists.ranks]
        while any(waiting):
            left = sum(map(len, waiting))
            for rank, actions in enumerate(waiting):
                while actions and self.does(rank, *actions[-1]):
                    actions.pop()
            assert sum(map(len, waiting)) < left, "a deadlock"

    def does(self, rank: int, stage: int, kind: str, microbatch: int) -> bool:
        d = len(self.stages)
        cost, batch = self.stages[stage % d], microbatch // self.m
        start = self.free[rank]
        copy = stage // d * d
        senders: list[int] = []
        if kind == "F":
            senders = [copy + a for a, b in self.sent if b == stage % d]
            senders += [stage - 1] if stage % d > 0 and stage - 1 not in senders else []
        elif kind in "BI":
            senders = [copy + b for a, b in self.sent if a == stage % d]
            senders += [stage + 1] if stage % d + 1 < d and stage + 1 not in senders else []
            start += cost["recompute"]
        for sender in senders:
            if (sender, stage, microbatch) not in self.arrived:
                return False
            start = max(start, self.arrived[sender, stage, microbatch])
        if kind == "F":
            read = self.lists.version_read(stage, microbatch) - 1
            start = max(start, self.updated.get((stage, read), 0.0))
        beside = kind == "U" and self.lists.versions[stage] > 1
        if kind == "U":
            self.came[stage, batch] = start
            twin = (stage + d) % self.lists.num_stages
            if (twin, batch) not in self.came:
                return False
            start = max(start, self.came[twin, batch])
            if beside:
                start = max(start, self.updated.get((stage, batch - 1), 0.0))
        parts = {
            "F": ("forward",),
            "B": ("input_grad", "weight_grad"),
            "I": ("input_grad",),
            "W": ("weight_grad",),
            "U": ("all_reduce", "update"),
        }
        end = start + sum(cost[part] for part in parts[kind])
        if kind == "U":
            self.updated[stage, batch] = end
        self.free[rank] = start if beside else end
        self.ends[rank][batch] = end
        self.send(rank, stage, kind, microbatch)
        return True

    def send(self, rank: int, stage: int, kind: str, microbatch: int) -> None:
        d = len(self.stages)
        own = stage % d
        forwards = {b for a, b in self.sent if a == own} | ({own + 1} if own + 1 < d else set())
        gradients = {a for a, b in self.sent if b == own} | ({own - 1} if own > 0 else set())
        to = forwards if kind == "F" else gradients if kind in "BI" else set()
        for other in to:
            receiver = stage - own + other
            edge = (min(own, other), max(own, other))
            latency, bandwidth, size = self.sent.get(edge, (0.0, float("inf"), 0.0))
            if self.lists.placement[receiver] == rank:
                latency, size = 0.0, 0.0
            leaves = max(self.free[rank], self.link_free.get((stage, receiver), 0.0))
            self.link_free[stage, receiver] = leaves + size / bandwidth
            self.arrived[stage, receiver, microbatch] = leaves + size / bandwidth + latency


def period(lists: Plan, stages: Sequence[Mapping[str, float]], sent: Sent) -> float:
    """Seconds of a batch, as the mean over many late ones, at the slowest rank."""
    every = [number for rank in lists.ranks for part in rank[1:] for _, _, number in part]
    behind = -(min(every) // lists.num_microbatches)
    window = max(2, behind + 2, 16 * len(lists.ranks) // lists.num_microbatches)
    num_batches = 2 * window + behind
    last = num_batches - 1 - behind
    ends = Run(lists, stages, sent, num_batches).ends
    return max((rank[last] - rank[last // 2]) / (last - last // 2) for rank in ends)
