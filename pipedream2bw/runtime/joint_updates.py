"""The stages that make their updates together, and what follows for receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import _C


class JointUpdates:
    """Which stages' forwards wait for each other's updates: for tied gradients, or all for a norm.

    Where a transfer keeps a device busy, executors post receives by a plan that knows of these.

    Attributes:
        join_all: whether all stages wait for each other.
    """

    def __init__(
        self,
        schedule: _C.Schedule,
        ties: Sequence[Sequence[int]],
        executors: Sequence[_C.Executor],
    ) -> None:
        """Joins tied stages so far.

        Args:
            schedule: what the stages do.
            ties: stages of the model with parameters in common that are trained.
            executors: those that post receives by a plan.
        """
        copies = range(0, schedule.num_stages, schedule.depth)
        self.join_all = False
        self._all = range(schedule.num_stages)
        self._tied = [[first + stage for first in copies for stage in tie] for tie in ties]
        self._executors = executors
        self._edges: dict[int, Sequence[tuple[int, int]]] = {}  # by wiring

    def __iter__(self) -> Iterator[Sequence[int]]:
        yield from self._tied
        if self.join_all:
            yield self._all

    def connect(self, wiring: int, edges: Sequence[tuple[int, int]]) -> None:
        """Plans the receives of runs with this wiring. ValueError if there is no safe plan."""
        self._edges[wiring] = edges
        for executor in self._executors:
            executor.plan_receives(wiring=wiring, edges=edges, joint=list(self))

    def set(self, *, join_all: bool) -> None:
        """Plans anew. Drained; every rank calls it. ValueError if there is no safe plan."""
        before, self.join_all = self.join_all, join_all
        try:
            for wiring, edges in self._edges.items():
                self.connect(wiring, edges)
        except ValueError:
            self.join_all = before
            raise
