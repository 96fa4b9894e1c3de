"""The idle time of flush schedules: as data, and work that is done there.

K. Osawa, S. Li and T. Hoefler, PipeFisher: Efficient Training of Large Language Models Using
Pipelining and Fisher Information Matrices, MLSys 2023, arXiv 2211.14133, section 3.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

from ..checks import check_number
from ..pipeline.module import PipelineModule
from ..rules import FUNCTION, instance
from ..schedules.events import Event, row_of

log = logging.getLogger("pipedream2bw")

_MARGIN = 1.05
"""How much longer than it takes a slot must be for a piece of work (PipeFisher, section 3.2)."""

_Result = TypeVar("_Result")


class IdleSlot(NamedTuple):
    """A time in which a rank does no action.

    Attributes:
        replica, rank: of the schedule.
        start, end: seconds, as the events have them.
        after: the action that ended before.
    """

    replica: int
    rank: int
    start: float
    end: float
    after: Event


def idle_slots(events: Iterable[Event], batch: int) -> list[IdleSlot]:
    """The idle slots of one batch: those that follow an action of the batch on its rank.

    >>> simulation = pd2.simulate("1f1b", num_stages=4, num_microbatches=8, backward=2.0)
    >>> slots = pd2.idle_slots(simulation.events, batch=1)
    >>> [sum(slot.end - slot.start for slot in slots if slot.rank == rank) for rank in range(4)]
    [9.0, 9.0, 9.0, 9.0]

    Args:
        events: of a simulation, or of ``pipe.timeline()``, in which updates count as actions.
        batch: by its number; the first one and the last one begin and end with a pipeline that is
            not full.

    Returns:
        The slots, by replica, rank and time.

    Raises:
        ValueError: the batch has no event.
    """
    by_row: dict[tuple[int, int], list[Event]] = {}
    for event in sorted(events, key=lambda event: (row_of(event), event.start, event.end)):
        by_row.setdefault(row_of(event), []).append(event)
    numbers = {event.batch for row in by_row.values() for event in row}
    if batch not in numbers:
        raise ValueError(f"idle_slots: batch: {batch}, the events are of {sorted(numbers)}")
    slots = []
    for (replica, rank), row in by_row.items():
        last = row[0]  # the one that ends last so far
        for event in row[1:]:
            if event.start > last.end and last.batch == batch:
                slots.append(IdleSlot(replica, rank, last.end, event.start, last))
            last = max(last, event, key=lambda each: each.end)
    return slots


def place_work(slots: Sequence[IdleSlot], seconds: Sequence[float]) -> list[IdleSlot | None]:
    """Gives each piece of work a slot with room for 1.05 of the time that it takes.

    It is the first one that is not before the slot of the piece before.

    Args:
        slots: of one rank, in order of time.
        seconds: that the pieces take, in the order in which they are to be done.

    Returns:
        The slot of each piece; None if no slot has room.

    Raises:
        ValueError, TypeError: a time is none; the slots are of several ranks.
    """
    instance("a list of numbers", Sequence).check("place_work: seconds", seconds)
    if len(ranks := {(slot.replica, slot.rank) for slot in slots}) > 1:
        raise ValueError(f"place_work: slots: of {sorted(ranks)}, they must be of one rank")
    room = [slot.end - slot.start for slot in slots]
    placed: list[IdleSlot | None] = []
    first = 0
    for each in seconds:
        check_number("place_work: seconds", each, at_least=0.0, below=float("inf"))
        needed = _MARGIN * each
        fitting = next((i for i in range(first, len(room)) if needed <= room[i]), None)
        placed.append(None if fitting is None else slots[fitting])
        if fitting is not None:
            room[fitting] -= needed
            first = fitting
    return placed


class BubbleWork(Generic[_Result]):
    """A piece of work that :meth:`InBubbles.begin` has begun."""

    def __init__(self, name: str, call: Callable[[], _Result], future: Future[_Result]) -> None:
        self.name = name
        self._call, self._future = call, future

    def end(self, former: _Result) -> _Result:
        """Waits for the work and returns what it gives; ``former``, with a warning, if it fails.

        Work that no bubble has had room for is done here, once.
        """
        try:
            if self._future.cancel():
                self._future = Future()
                self._future.set_result(self._call())
            return self._future.result()
        except Exception as error:
            log.warning("in bubbles: %s failed", self.name, exc_info=error)
            warnings.warn(
                f"in bubbles: {self.name} failed, what was there before is used: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
            return former


class InBubbles:
    """Does work in the time that a process's stages leave idle.

    The work has a thread of its own, of the lowest priority. So the operating system gives it what
    bubbles leave of a processor, and it makes way for actions. Flush schedules (``"1f1b"``) have
    bubbles, ``"2bw"`` has none. A run computes the same whatever the bubbles are, if what is begun
    in one batch is ended in a certain later one:

    >>> bubbles = pd2.InBubbles(pipe)
    >>> work = bubbles.begin("the basis", lambda: torch.linalg.qr(torch.ones(2, 2)).Q)
    >>> basis = work.end(former=torch.eye(2))  # some batches later

    examples/train_soap.py does so in an optimizer's step. Work is of the host: what it launches on
    a device has the device's priority. Other programs on the same processors go first, too.

    Args:
        pipe: an open pipeline; work that waits when the pipeline is gone is not begun.
    """

    def __init__(self, pipe: PipelineModule) -> None:
        instance("a PipelineModule", PipelineModule).check("InBubbles: pipe", pipe)
        self._pool = ThreadPoolExecutor(1, "pd2 in bubbles", initializer=_make_way)
        weakref.finalize(pipe, self._pool.shutdown, wait=False, cancel_futures=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> InBubbles:
        return self  # stages' copies of an optimizer share it

    def begin(self, name: str, call: Callable[[], _Result]) -> BubbleWork[_Result]:
        """Has ``call`` done, after what was begun before. It must not wait for the pipeline.

        Args:
            name: says what it is where it fails.
        """
        FUNCTION.check(f"in bubbles: {name}", call)
        return BubbleWork(name, call, self._pool.submit(call))


def _make_way() -> None:
    # Not SCHED_IDLE: under it the thread may get no time at all while it holds Python's lock.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
