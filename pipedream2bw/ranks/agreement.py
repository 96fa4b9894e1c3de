"""How the processes of a pipeline agree before any of them waits for another.

Every operation that all ranks have to call together starts with one tiny exchange. It tells all
ranks what only one can see (a batch with too few rows, a wrong target), and finds ranks that call
different operations, so that every rank raises and none hangs.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .. import _C, errors
from ..errors import (
    PeerLost,
    PeerTimeout,
    RemoteTraceback,
    StageError,
    from_document,
    reworded,
    to_document,
)
from .boards import RowExchange, make_board
from .deadline import Deadline
from .first_failure import FirstFailure
from .groups import destroy_groups, new_group, number_groups_alike
from .joining import join_world


class Operation(enum.IntEnum):
    """The operations that all ranks begin together."""

    train_step = 1
    flush = 2
    evaluation = 3
    close = 4
    state_dict = 5
    full_state_dict = 6
    load_state_dict = 7
    optimizer_state_dict = 8
    optimizer_load_state_dict = 9
    end_of_timeline = 10
    gather_events = 11
    new_optimizer = 12
    save = 13
    load = 14
    end_of_drain = 15
    new_mesh = 16
    read_loss = 17
    register_comm_hook = 18
    measure_skew = 19
    use_folder = 20
    wait_for_saves = 21


class BatchDiscarded(Exception):  # noqa: N818
    """A rank knows of a batch that is discarded: all ranks have to drain and take it back."""


class DrainWanted(Exception):  # noqa: N818
    """A rank reads what comes in a drain alone, while others begin something else: all drain."""


class Announcement(NamedTuple):
    """What a rank tells of a train_step or an evaluation; -1: it does not know.

    Other operations have rows of their own; one that tells nothing has this one as it is.
    """

    argument_rows: int = -1
    target_rows: int = -1
    shapes: int = -1  # their hash
    training: int = -1  # the module's mode, 0 or 1
    ends_batch: int = -1  # whether an optimizer step follows, 0 or 1
    normalizer: int = -1  # of the replica's losses, in the batch
    is_list: int = -1  # whether the microbatches are ready-made, 0 or 1
    saves: int = 0  # whether the run is to be saved after the batch, 0 or 1
    stop_signal: int = 0  # the signal for which the run is to be saved and ended; 0: none


class UpdatesMayWait(NamedTuple):
    """What a rank tells of a new optimizer: whether its updates can wait for all stages."""

    can: int


class Finished(NamedTuple):
    """What a rank tells of work that it waits for: whether that is done."""

    is_done: int


_Made = TypeVar("_Made")
_ROW_LENGTH = 4 + len(Announcement._fields)  # the longest of them, and what all begin with
_Row = TypeVar("_Row", bound=tuple[int, ...])


class ControlPlane:
    """Agreement among all ranks of the pipeline; with one rank, agreement with itself.

    The ranks exchange what they know through memory where they share it, and between machines by
    one rank of each, see :class:`RowExchange`.

    A rank that fails tells the process group's store its failure, and all ranks look there: so a
    failure ends every rank's waiting, whatever it waits for.

    Args:
        world: number of processes.
        deadline: ends waiting for other ranks; its fault is raised when another one has failed.
        name: of the pipeline, the same on every rank.

    Attributes:
        deadline: as given.
        fault, timeout: its own.
        group: all ranks' processes; None with one rank, and once the agreement has ended.
        board: the memory that all of them share, None with several machines.
        discards: the first batch that is discarded.
        verdict_group, verdict_board: over which stages agree on a batch; None with one rank.
        place: this rank, in messages.
    """

    def __init__(self, world: int, deadline: Deadline, name: str) -> None:
        self.fault = deadline.fault
        self.deadline = deadline
        self.timeout = deadline.seconds
        self.group: dist.ProcessGroup | None = None
        self.board: _C.SharedBoard | None = None
        self.verdict_group: dist.ProcessGroup | None = None
        self.verdict_board: _C.SharedBoard | None = None
        self.place = "here"
        self._first_failure: FirstFailure | None = None
        self._rows: RowExchange | None = None
        self._closed_too: list[Callable[[], None]] = []
        if world > 1:
            store = dist.distributed_c10d._get_default_store()
            deadline.wait("joining all ranks", lambda: number_groups_alike(store, name))
            self.group = new_group([range(world)], deadline, "gloo")
            assert self.group is not None
            self._rows = RowExchange(self.group, _ROW_LENGTH, deadline)
            self.board = self._rows.board
            self.verdict_group = self.group
            self.verdict_board = make_board(self.group, 1, deadline)
            if self.verdict_board is None:  # collectives of two threads need two groups
                self.verdict_group = new_group([range(world)], deadline, "gloo")
        self.discards = _C.Discards(self.board)
        if world > 1:
            # Processes before these, started by the same torchrun, may have left failures there.
            name = f"{name}/{self.from_first(lambda: secrets.token_hex(4))}"
            self._first_failure = FirstFailure(store, name, self.fault)

    @property
    def discards_reach_all(self) -> bool:
        """Whether a stage knows that a batch is discarded before it gets a message of it."""
        return self.board is not None or self.group is None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def agree(self, operation: Operation, number: int, local: Callable[[], _Row]) -> list[_Row]:
        """Runs ``local`` on every rank and returns all ranks' rows of whole numbers.

        Raises:
            Exception: what ``local`` raised here; on the other ranks the same with the rank named.
            StageError: ranks called different operations, or one is gone or silent.
            BatchDiscarded: on every rank.
            DrainWanted: on every rank.
        """
        error: Exception | None = None
        mine: _Row | None = None
        try:
            mine = local()
        except Exception as raised:
            error = raised
        table = self._exchange_rows(operation, number, error is not None, mine or ())
        if _first_discarded(table) is not None:
            raise BatchDiscarded()
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

    def why_discarded(self, batch: int) -> StageError:
        """Why a batch is discarded. Every rank calls it, drained."""
        error = self.discards.error if self.discards.batch == batch else None
        if self.group is None:
            assert error is not None
            return error
        told = self.told_by_all(None if error is None else to_document(error))
        return from_document(next(document for document in told if document is not None))

    def _exchange_rows(
        self, operation: Operation, number: int, failed: bool, told: Sequence[int]
    ) -> list[list[int]]:
        first = self.discards.first
        row = [operation, number, failed, -1 if first is None else first, *told]
        row += [0] * (_ROW_LENGTH - len(row))
        if self._rows is None:
            return [row]
        failure = self.fault.error
        if failure is not None and self._rows.is_under_way:
            raise failure
        table = self._rows.run(row, lambda look: self._wait(look, operation, number))
        self._check_same_operation(table)
        return table

    def told_by_all(self, value: _Made, action: str = "agreeing") -> list[_Made]:
        """Every rank's ``value``, on every rank. It costs more than :meth:`agree`.

        Args:
            action: what an error says that took too long.
        """
        if self.group is None:
            return [value]
        told: list[Any] = [None] * self.size
        self.deadline.wait(action, lambda: dist.all_gather_object(told, value, group=self.group))
        return told

    def agree_on_objects(self, error: Exception | None, settings: Mapping[str, Any]) -> None:
        """Raises on every rank if one has an error, or if ranks differ in a setting."""
        if self.group is None:
            if error is not None:
                raise error
            return
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
            if callable(same):
                settings = same(made[0])
        except Exception as raised:
            error = raised
        self.agree_on_objects(error, settings)
        return made[0]

    def from_first(self, make: Callable[[], _Made]) -> _Made:
        """Calls ``make`` on rank 0 alone; every rank returns what it gives, or raises."""
        if self.group is None:
            return make()
        made: list[Any] = [self.together(make if self.group.rank() == 0 else lambda: None)]
        self.deadline.wait(
            "agreeing", lambda: dist.broadcast_object_list(made, group=self.group, group_src=0)
        )
        found: _Made = made[0]
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0 of the pipeline, an empty list elsewhere."""
        if self.group is None:
            return [value]
        is_root = self.group.rank() == 0
        gathered: list[Any] | None = [None] * self.size if is_root else None
        self.deadline.wait(
            "gathering",
            lambda: dist.gather_object(value, gathered, group=self.group, group_dst=0),
        )
        return gathered or []

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
        return failure if self._first_failure is None else self._first_failure.report(failure)

    def _wait(self, look: Callable[[], _Made | None], operation: Operation, number: int) -> _Made:
        """Calls ``look``, which waits for a slice of time, until it finds something.

        So Ctrl-C and a failure of this process end the waiting.
        """
        start = time.monotonic()
        error: RuntimeError | None = None
        while error is None:
            try:
                found = look()
                if found is not None:
                    return found
            except RuntimeError as raised:
                error = raised
            failure = self.fault.error
            if failure is not None:
                raise failure
            if error is None and time.monotonic() - start > self.timeout:
                error = PeerTimeout(f"timeout after {self.timeout} s")
        # torch.distributed tells a timeout, which may come a little before ours, by its text alone.
        is_late = time.monotonic() - start > 0.9 * self.timeout
        kind = PeerTimeout if is_late and not isinstance(error, PeerLost) else PeerLost
        failure = kind(
            f"{self.place}: a rank was lost while all ranks began {operation.name} {number}: "
            f"{error}",
            rank=error.rank if isinstance(error, StageError) else None,
            batch=number if operation == Operation.train_step else None,
            action=operation.name,
            cause=str(error),
        )
        self.fault.raise_(failure)
        raise failure

    def _check_same_operation(self, table: list[list[int]]) -> None:
        called = [(Operation(row[0]).name, row[1]) for row in table]
        # Who reads a loss makes the call of the others later.
        if len({call for call in called if call[0] != Operation.read_loss.name}) > 1:
            listed = ", ".join(
                f"rank {rank}: {name} {number}" for rank, (name, number) in enumerate(called)
            )
            cause = f"all ranks must make the same calls in the same order: {listed}"
            failure = StageError(cause, cause=cause)
            self.fault.raise_(failure)
            raise failure

    def close_too(self, close: Callable[[], None]) -> None:
        """Calls ``close`` when the agreement ends."""
        self._closed_too.append(close)

    def close(self) -> None:
        """Ends the agreement; ranks that wait for this one get an error."""
        while self._closed_too:
            self._closed_too.pop()()
        if self._first_failure is not None:
            self._first_failure.close()
            self._first_failure = None
        if self._rows is not None:
            self._rows.close()
            self._rows = self.board = None
        if self.verdict_board is not None:
            self.verdict_board.leave()
            self.verdict_board = None
        destroy_groups(each for each in {self.group, self.verdict_group} if each is not None)
        self.group = self.verdict_group = None
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
