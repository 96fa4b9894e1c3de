"""An exchange of rows between all ranks: in memory within a machine, by leaders beyond."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from .. import _C
from ..errors import PeerLost
from .boards import find_machines, make_boards
from .deadline import Deadline
from .groups import destroy_groups, new_group

SLICE_SECONDS = 0.1

_Found = TypeVar("_Found")


class Wait(Protocol):
    """Calls a function, which waits for a slice of time, until it finds something."""

    def __call__(self, look: Callable[[], _Found | None], /) -> _Found: ...


class RowExchange:
    """Gives every rank every rank's row.

    The leader of a machine is the first of its ranks. With one machine there is one board, and no
    leader has anything to do; with one rank per machine there are leaders alone.

        ranks of a machine ─row→ board ─→ leader ⇄ (gloo) ⇄ other leaders
        ranks of a machine ←───────── second board ←── the table

    Args:
        group: of all ranks' hosts. Every rank makes it.
        row_size: numbers in a row.
        deadline: ends waiting while it is made.

    Attributes:
        machines: the ranks on each.
        board: the memory that all ranks share, None with several machines.
        is_under_way: whether an exchange has begun and not ended; then none may begin any more.
    """

    def __init__(self, group: dist.ProcessGroup, row_size: int, deadline: Deadline) -> None:
        self._group = group
        self._row_size = row_size
        self.is_under_way = False
        machines = find_machines(group, deadline)
        table_size = group.size() * row_size
        sizes = [row_size] if len(machines) == 1 else [row_size, table_size]
        self.machines, machine = make_boards(group, machines, sizes, deadline)
        self._boards = machine.boards
        self._ranks = machine.ranks
        self.board = self._boards[0] if len(self.machines) == 1 else None
        self._leaders: dist.ProcessGroup | None = None
        self._made: list[dist.ProcessGroup] = []
        if len(self.machines) == group.size():
            self._leaders = group
        elif self.board is None:
            leaders = [dist.get_global_rank(group, ranks[0]) for ranks in self.machines]
            self._leaders = new_group([leaders], deadline, "gloo")
            self._made = [self._leaders] if self._leaders else []

    def run(self, row: Sequence[int], wait: Wait) -> list[list[int]]:
        """Every rank's row. Every rank calls it; what it waits for goes through ``wait``."""
        size = self._row_size
        rows = list(row)
        self.is_under_way = True
        if self._boards:
            rows = self._on_board(self._boards[0], rows, wait)
        if self.board is None:
            table = [0] * (self._group.size() * size)
            if self._leaders is not None:
                table = self._between_machines(self._leaders, rows, wait)
            if self._boards:  # the leader's row is the first
                table = self._on_board(self._boards[1], table, wait)[: len(table)]
            rows = table
        self.is_under_way = False
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _on_board(self, board: _C.SharedBoard, row: Sequence[int], wait: Wait) -> list[int]:
        def look() -> list[int] | None:
            try:
                return board.finish_exchange(SLICE_SECONDS)
            except PeerLost as error:
                if error.rank is None or self.board is not None:
                    raise
                rank = self._ranks[error.rank]  # the board knows places on its machine alone
                raise PeerLost(f"rank {rank} has ended or left the pipeline", rank=rank) from error

        board.begin_exchange(row)
        return wait(look)

    def _between_machines(
        self, leaders: dist.ProcessGroup, rows: Sequence[int], wait: Wait
    ) -> list[int]:
        """All ranks' rows, from those of each leader's machine.

        Gathered and sent back by one leader: with L leaders 2(L - 1) messages, where an
        all-gather's ring takes L(L - 1). The group's own methods: torch.distributed's functions
        around them take longer than the work.
        """
        size = self._row_size
        most = max(map(len, self.machines)) * size
        mine = torch.zeros(most, dtype=torch.int64)
        mine[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        all_rows = torch.empty(leaders.size(), most, dtype=torch.int64)
        parts = list(all_rows.unbind()) if leaders.rank() == 0 else []
        gathering = leaders.gather(parts, mine, 0)
        wait(lambda: finish(gathering))
        spreading = leaders.broadcast(all_rows, 0)
        wait(lambda: finish(spreading))
        table = torch.empty(self._group.size(), size, dtype=torch.int64)
        for ranks, of_machine in zip(self.machines, all_rows, strict=True):
            table[ranks] = of_machine[: len(ranks) * size].view(-1, size)
        found: list[int] = table.flatten().tolist()
        return found

    def close(self) -> None:
        """Leaves; ranks that wait for this one get an error."""
        for board in self._boards:
            board.leave()
        self._boards = []
        self.board = None
        destroy_groups(self._made)
        self._made = []
        self._leaders = None


def finish(work: dist.Work) -> bool | None:
    """True if ``work`` is done within a slice of waiting; raises if it has failed."""
    # No callback of the work's future: the group's thread would run it and need the interpreter
    # while whoever frees the group holds it and waits for that thread.
    #
    # Asked before: work that completes between a slice's end and the question has not failed.
    was_completed = work.is_completed()
    try:
        work.wait(datetime.timedelta(seconds=SLICE_SECONDS))
    except RuntimeError:
        if was_completed:
            raise
        return None
    return True
