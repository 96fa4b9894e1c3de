"""The processes of a pipeline, where there are several, and what connects them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..errors import PeerLost, PeerTimeout, StageError
from .boards import RowExchange, make_board
from .deadline import Deadline
from .first_failure import FirstFailure
from .groups import destroy_groups, new_group, number_groups_alike, told_by_all
from .operations import ROW_LENGTH, Operation

_Made = TypeVar("_Made")


class Peers:
    """All processes of a pipeline, of which this is one.

    They exchange rows of numbers through memory where they share it, and between machines by one
    rank of each, see :class:`RowExchange`.

    A rank that fails tells the process group's store its failure, and all ranks look there: so a
    failure ends every rank's waiting, whatever it waits for.

    Attributes:
        group: all ranks' processes.
        board: the memory that all of them share, None with several machines.
        rows: exchanges the ranks' rows.
        verdict_group, verdict_board: over which stages agree on a batch.
        first_failure: tells failures.
    """

    def __init__(self, world: int, deadline: Deadline, name: str) -> None:
        self._deadline = deadline
        store = dist.distributed_c10d._get_default_store()
        deadline.wait("joining all ranks", lambda: number_groups_alike(store, name))
        group = new_group([range(world)], deadline, "gloo")
        assert group is not None
        self.group = group
        self.rows = RowExchange(group, ROW_LENGTH, deadline)
        self.board = self.rows.board
        self.verdict_group = group
        self.verdict_board = make_board(group, 1, deadline)
        if self.verdict_board is None:  # collectives of two threads need two groups
            other = new_group([range(world)], deadline, "gloo")
            assert other is not None
            self.verdict_group = other
        # Processes before these, started by the same torchrun, may have left failures there.
        name = f"{name}/{told_by_all(secrets.token_hex(4), group, deadline, 'agreeing')[0]}"
        self.first_failure = FirstFailure(store, name, deadline.fault)

    def exchange(
        self, row: list[int], operation: Operation, number: int, place: str
    ) -> list[list[int]]:
        """Every rank's row, on every rank.

        Args:
            row: begins with the operation and its number.
            place: this rank, in messages.

        Raises:
            StageError: ranks called different operations, or one is gone or silent.
        """
        failure = self._deadline.fault.error
        if failure is not None and self.rows.is_under_way:
            raise failure
        table = self.rows.run(
            row, lambda look: wait_for_all(look, self._deadline, operation, number, place)
        )
        called = [(Operation(row[0]).name, row[1]) for row in table]
        # Who reads a loss makes the call of the others later.
        if len({call for call in called if call[0] != Operation.read_loss.name}) > 1:
            listed = ", ".join(
                f"rank {rank}: {name} {number}" for rank, (name, number) in enumerate(called)
            )
            cause = f"all ranks must make the same calls in the same order: {listed}"
            failure = StageError(cause, cause=cause)
            self._deadline.fault.raise_(failure)
            raise failure
        return table

    def close(self) -> None:
        """Parts from the others; ranks that wait for this one get an error."""
        self.first_failure.close()
        self.rows.close()
        if self.verdict_board is not None:
            self.verdict_board.leave()
        self.board = self.verdict_board = None  # a failure's traceback may keep this object
        destroy_groups({self.group, self.verdict_group})


def wait_for_all(
    look: Callable[[], _Made | None],
    deadline: Deadline,
    operation: Operation,
    number: int,
    place: str,
) -> _Made:
    """Calls ``look``, which waits for a slice of time, until it finds something.

    So Ctrl-C and a failure of this process end the waiting.
    """
    start, timeout = time.monotonic(), deadline.seconds
    error: RuntimeError | None = None
    while error is None:
        try:
            found = look()
            if found is not None:
                return found
        except RuntimeError as raised:
            error = raised
        failure = deadline.fault.error
        if failure is not None:
            raise failure
        if error is None and time.monotonic() - start > timeout:
            error = PeerTimeout(f"timeout after {timeout} s")
    kind = PeerLost if isinstance(error, PeerLost) else deadline.kind_of_loss(start)
    failure = kind(
        f"{place}: a rank was lost while all ranks began {operation.name} {number}: {error}",
        rank=error.rank if isinstance(error, StageError) else None,
        batch=number if operation == Operation.train_step else None,
        action=operation.name,
        cause=str(error),
    )
    deadline.fault.raise_(failure)
    raise failure
