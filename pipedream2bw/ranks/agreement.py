"""How the processes of a pipeline agree before any of them waits for another.

Every operation that all ranks have to call together starts with one tiny exchange. It tells all
ranks what only one can see (a batch with too few rows, a wrong target), and finds ranks that call
different operations. So every rank raises and none hangs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .. import _C, errors
from ..errors import RemoteTraceback, StageError, reworded
from .deadline import Deadline
from .groups import told_by_all
from .joining import join_world
from .operations import ROW_LENGTH, Operation
from .peers import Peers


class DrainWanted(Exception):  # noqa: N818
    """A rank knows of a discarded batch, or reads what comes in a drain alone: all drain."""


_Made = TypeVar("_Made")
_Row = TypeVar("_Row", bound=tuple[int, ...])


class ControlPlane:
    """Agreement among all ranks of the pipeline; with one rank, agreement with itself.

    Args:
        world: number of processes.
        deadline: ends waiting for other ranks; its fault is raised when another one has failed.
        name: of the pipeline, the same on every rank.

    Attributes:
        deadline: as given; fault, timeout: its own.
        peers: the processes of all ranks; None with one rank, and once the agreement has ended.
        discards: the first batch that is discarded.
        untold: what this rank raised and could not tell, since others waited for what it left.
        place: this rank, in messages.
    """

    def __init__(self, world: int, deadline: Deadline, name: str) -> None:
        self.fault = deadline.fault
        self.deadline = deadline
        self.timeout = deadline.seconds
        self.peers = Peers(world, deadline, name) if world > 1 else None
        self.place = "here"
        self.untold: Exception | None = None
        self._closed_too: list[Callable[[], None]] = []
        self.discards = _C.Discards(None if self.peers is None else self.peers.board)

    @property
    def discards_reach_all(self) -> bool:
        """Whether a stage knows that a batch is discarded before it gets a message of it."""
        return self.peers is None or self.peers.board is not None

    @property
    def size(self) -> int:
        return 1 if self.peers is None else self.peers.group.size()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks' processes; None with one rank, and once the agreement has ended."""
        return None if self.peers is None else self.peers.group

    def agree(self, operation: Operation, number: int, local: Callable[[], _Row]) -> list[_Row]:
        """Runs ``local`` on every rank and returns all ranks' rows of whole numbers.

        Raises:
            Exception: what ``local`` raised here; on the other ranks the same with the rank named.
            StageError: ranks called different operations, or one is gone or silent.
            DrainWanted: on every rank.
        """
        error: Exception | None = None
        mine: _Row | None = None
        try:
            mine = local()
        except Exception as raised:
            error = raised
        with self._telling(error):
            table = self._exchange_rows(operation, number, error is not None, mine or ())
            if _first_discarded(table) is not None:
                raise DrainWanted()
            if any(row[2] for row in table):
                self.agree_on_objects(error, {})
        if any(row[0] == Operation.read_loss for row in table):
            raise DrainWanted()
        assert mine is not None
        as_named: Any = type(mine)
        return [as_named(*row[4 : 4 + len(mine)]) for row in table]

    def first_discarded(self) -> int | None:
        """The first batch that any rank knows to be discarded. Every rank calls it, drained."""
        return _first_discarded(self._exchange_rows(Operation.end_of_drain, 0, False, ()))

    def _exchange_rows(
        self, operation: Operation, number: int, failed: bool, told: Sequence[int]
    ) -> list[list[int]]:
        first = self.discards.first
        row = [operation, number, failed, -1 if first is None else first, *told]
        row += [0] * (ROW_LENGTH - len(row))
        if self.peers is None:
            return [row]
        return self.peers.exchange(row, operation, number, self.place)

    @contextlib.contextmanager
    def _telling(self, error: Exception | None) -> Iterator[None]:
        try:
            yield
        finally:
            self.untold = error if self.fault.raised else None

    def told_by_all(self, value: _Made, action: str = "agreeing") -> list[_Made]:
        """Every rank's ``value``, on every rank. It costs more than :meth:`agree`.

        Args:
            action: what an error says that took too long.
        """
        if self.group is None:
            return [value]
        return told_by_all(value, self.group, self.deadline, action)

    def agree_on_objects(self, error: Exception | None, settings: Mapping[str, Any]) -> None:
        """Raises on every rank if one has an error, or if ranks differ in a setting."""
        everyone = self.told_by_all((_describe(error), settings))
        for key in settings:
            values = [theirs.get(key, settings[key]) for _, theirs in everyone]
            if any(value != values[0] for value in values):
                shown = enumerate(_where_they_differ(values))
                listed = ", ".join(f"rank {rank}: {value}" for rank, value in shown)
                raise ValueError(f"{key} must be the same on every rank, got {listed}")
        for rank, (told, _) in enumerate(everyone):
            if told is not None:  # the first rank's kind on all: callers go on by it
                if type(_describe(error)) is type(told):
                    assert error is not None
                    raise error
                raise reworded(told, f"rank {rank}: {told}") from error

    def together(
        self,
        make: Callable[[], _Made],
        *,
        same: Mapping[str, Any] | Callable[[_Made], Mapping[str, Any]] | None = None,
    ) -> _Made:
        """Calls ``make`` on every rank; returns what it gives here, or raises on every rank.

        Args:
            same: settings that must be equal on all ranks, or what gives them of what was made.
                Known ones are compared first, also where ``make`` raises.

        Raises:
            Exception: what ``make`` raised here; on the other ranks the same with the rank named.
            ValueError: ranks differ in a setting.
        """
        error: Exception | None = None
        made: list[_Made] = []
        settings = same if isinstance(same, Mapping) else {}
        try:
            made.append(make())
            if callable(same) and self.peers is not None:
                settings = same(made[0])
        except Exception as raised:
            error = raised
        with self._telling(error):
            self.agree_on_objects(error, settings)
        return made[0]

    def from_first(self, make: Callable[[], _Made]) -> _Made:
        """Calls ``make`` on rank 0 alone; every rank returns what it gives, or raises."""
        if self.group is None:
            return make()
        told: list[Any] = [self.together(make if self.group.rank() == 0 else lambda: None)]
        send = functools.partial(dist.broadcast_object_list, told, group=self.group, group_src=0)
        self.deadline.wait("agreeing", send)
        made: _Made = told[0]
        return made

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0 of the pipeline, an empty list elsewhere."""
        if self.group is None:
            return [value]
        told: list[Any] | None = [None] * self.size if self.group.rank() == 0 else None
        send = functools.partial(dist.gather_object, value, told, group=self.group, group_dst=0)
        self.deadline.wait("gathering", send)
        return told or []

    @contextlib.contextmanager
    def errors_told(self) -> Iterator[None]:
        """Tells the other ranks, which may wait for this one, what is raised here alone."""
        try:
            yield
        except BaseException as error:
            cause = f"{type(error).__name__} {error}".strip()
            failure = StageError(f"{self.place}: {cause}", rank=self.fault.rank, cause=cause)
            failure.__cause__ = RemoteTraceback("".join(traceback.format_exception(error)))
            self.fault.raise_(failure)  # where it is not a consequence of another failure
            raise

    def report(self, failure: StageError) -> StageError:
        """Tells the others why this rank failed; returns the first failure that any rank told.

        That is ``failure`` itself if no other rank was faster, or if nobody answers.
        """
        return failure if self.peers is None else self.peers.first_failure.report(failure)

    def close_too(self, close: Callable[[], None]) -> None:
        """Calls ``close`` when the agreement ends."""
        self._closed_too.append(close)

    def close(self) -> None:
        """Ends the agreement; ranks that wait for this one get an error."""
        while self._closed_too:
            self._closed_too.pop()()
        if self.peers is not None:
            self.peers.close()
            self.peers = None
        self.discards = _C.Discards(None)  # the other one keeps the memory that ranks share


def join(name: str, device_type: str, timeout: object) -> ControlPlane:
    """Joins the others, within a minute if ``timeout`` is none: so they agree on that error."""
    is_number = isinstance(timeout, (int, float)) and 0 < timeout < math.inf
    seconds = float(timeout) if is_number else 60.0  # type: ignore[arg-type]
    world = join_world(device_type, Deadline(seconds, _C.Fault()))
    fault = _C.Fault(rank=dist.get_rank() if world > 1 else 0)
    return ControlPlane(world, Deadline(seconds, fault), name)


def _first_discarded(table: list[list[int]]) -> int | None:
    return min((row[3] for row in table if row[3] >= 0), default=None)


def _where_they_differ(values: list[Any]) -> list[Any]:
    """The values, or of lists, which may be long, the first elements that differ."""
    if all(isinstance(value, list) for value in values):
        for items in itertools.zip_longest(*values, fillvalue="none"):
            if any(item != items[0] for item in items):
                return list(items)
    return values


def _describe(error: Exception | None) -> Exception | None:
    """The error as other ranks raise it: all of ours, of others the type that everybody has."""
    if error is None or type(error).__module__ == errors.__name__:
        return error
    kinds = (ValueError, TypeError, TimeoutError, OSError, RuntimeError)
    kind = next((known for known in kinds if isinstance(error, known)), RuntimeError)
    return kind(str(error) or type(error).__name__)
