"""The stages that make their updates together, and what follows for receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import _C


class JointUpdates:
    """Which stages' forwards wait for each other's updates: for tied gradients, or all of them.

    Where a transfer keeps a device busy, executors post receives by a plan that knows of these.

    Args:
        ties: stages of the model with parameters in common that are trained.
        executors: those that post receives by a plan.

    Attributes:
        have_norm: whether all stages' updates wait for one norm.
        tied: the ties as stages of the schedule.
    """

    def __init__(
        self,
        schedule: _C.Schedule,
        ties: Sequence[Sequence[int]],
        executors: Sequence[_C.Executor],
    ) -> None:
        copies = range(0, schedule.num_stages, schedule.depth)
        self.have_norm = False
        self._has_one_delay = schedule.has_one_delay
        self._all = range(schedule.num_stages)
        self.tied = [[first + stage for first in copies for stage in tie] for tie in ties]
        self._executors = executors
        self._edges: dict[int, Sequence[tuple[int, int]]] = {}  # by wiring

    def __iter__(self) -> Iterator[Sequence[int]]:
        yield from self.tied
        if self.have_norm:
            yield self._all

    @property
    def need_later_batches(self) -> bool:
        """Whether forwards may wait for updates that a later batch, or a drain, lets begin."""
        return not self._has_one_delay and any(self)

    def connect(self, wiring: int, edges: Sequence[tuple[int, int]]) -> None:
        """Plans the receives of runs with this wiring. ValueError if there is no safe plan."""
        self._edges[wiring] = edges
        for executor in self._executors:
            executor.plan_receives(wiring=wiring, edges=edges, joint=list(self))

    def set_norm(self, has_norm: bool) -> None:
        """Plans anew. Drained; every rank calls it. ValueError if there is no safe plan."""
        before, self.have_norm = self.have_norm, has_norm
        try:
            self.plan_anew()
        except ValueError:
            self.have_norm = before
            raise

    def plan_anew(self) -> None:
        """Plans the receives of all runs. Drained; every rank calls it."""
        for wiring, edges in self._edges.items():
            self.connect(wiring, edges)
