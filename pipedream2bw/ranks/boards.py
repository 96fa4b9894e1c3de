"""Memory shared by those ranks of a group that are on one machine, and what goes through it."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..errors import PeerLost
from .deadline import Deadline
from .groups import destroy_groups, new_group, told_by_all

SLICE_SECONDS = 0.1
_ACTION = "sharing memory"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """What the processes of one machine have in common, and no others."""
    return _BOOT.read_text() if _BOOT.exists() else socket.gethostname()


def find_machines(group: dist.ProcessGroup, deadline: Deadline) -> list[list[int]]:
    """The group's ranks by machine, ordered by the first of each. Every rank of it calls it."""
    machines: dict[str, list[int]] = {}
    for rank, machine in enumerate(told_by_all(machine_id(), group, deadline, _ACTION)):
        machines.setdefault(machine, []).append(rank)
    return list(machines.values())


def make_boards(
    group: dist.ProcessGroup,
    machines: Sequence[Sequence[int]],
    row_sizes: Sequence[int],
    deadline: Deadline,
) -> tuple[list[list[int]], list[_C.SharedBoard]]:
    """Shares memory within each machine. Every rank of the group calls it.

    Some containers and users let a rank see another one's memory and some do not, so ranks try and
    tell. Those of a machine of which one cannot are machines of one rank each.

    Returns:
        The ranks of the machines as they are, and the boards of this rank's; none if it is alone.
    """
    here = next(list(ranks) for ranks in machines if group.rank() in ranks)
    place, seconds = here.index(group.rank()), deadline.seconds
    boards: list[_C.SharedBoard | None] = []
    if place == 0 and len(here) > 1:
        boards = [_C.SharedBoard.create(len(here), size, seconds) for size in row_sizes]
    mine = [board.address if board else "" for board in boards]
    addresses = told_by_all(mine, group, deadline, _ACTION)
    if place > 0:
        boards = [_C.SharedBoard.open(told, place, seconds) for told in addresses[here[0]]]
    share = told_by_all(bool(boards) and all(boards), group, deadline, _ACTION)
    found: list[list[int]] = []
    for ranks in machines:
        together = all(share[rank] for rank in ranks)
        found += [list(ranks)] if together else [[rank] for rank in ranks]
    are_shared = all(share[rank] for rank in here)
    return sorted(found), [board for board in boards if board is not None and are_shared]


def make_board(
    group: dist.ProcessGroup, row_size: int, deadline: Deadline
) -> _C.SharedBoard | None:
    """Memory shared by all of a group's ranks, None if one cannot reach it or there is but one.

    Every rank of the group calls it.
    """
    machines, boards = make_boards(group, find_machines(group, deadline), [row_size], deadline)
    return boards[0] if len(machines) == 1 and boards else None


Wait = Callable[[Callable[[], Any]], Any]
"""Calls a function, which waits for a slice of time, until it finds something."""


class RowExchange:
    """Gives every rank every rank's row.

    The leader of a machine is the first of its ranks. With one machine there is one board, and no
    leader has anything to do; with one rank per machine there are leaders alone.

        ranks of a machine ─row→ board ─→ leader ⇄ (gloo) ⇄ other leaders
        ranks of a machine ←───────── second board ←── the table

    Args:
        group: of all ranks' hosts. Every rank makes it.

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
        self.machines, self._boards = make_boards(group, machines, sizes, deadline)
        self._ranks = next(ranks for ranks in self.machines if group.rank() in ranks)
        self.board = self._boards[0] if len(self.machines) == 1 else None
        self._leaders: dist.ProcessGroup | None = None
        if len(self.machines) == group.size():
            self._leaders = group
        elif self.board is None:
            leaders = [dist.get_global_rank(group, ranks[0]) for ranks in self.machines]
            self._leaders = new_group([leaders], deadline, "gloo")

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
        rows: list[int] = wait(look)
        return rows

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
        if self._leaders not in (None, self._group):
            destroy_groups([self._leaders])
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
