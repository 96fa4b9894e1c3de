"""Boards: memory shared by those ranks of a group that are on one machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _C
from .deadline import Deadline

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Machine(NamedTuple):
    """The ranks of a group that share memory with this one.

    Attributes:
        ranks: in the group, in order; the first is the leader.
        boards: of these ranks; none where a rank is alone.
    """

    ranks: list[int]
    boards: list[_C.SharedBoard]


def machine_id() -> str:
    """What the processes of one machine have in common, and no others."""
    return _BOOT.read_text() if _BOOT.exists() else socket.gethostname()


def find_machines(group: dist.ProcessGroup, deadline: Deadline) -> list[list[int]]:
    """The group's ranks by machine, ordered by the first of each. Every rank of it calls it."""
    machines: dict[str, list[int]] = {}
    for rank, machine in enumerate(_gather(machine_id(), group, deadline)):
        machines.setdefault(machine, []).append(rank)
    return list(machines.values())


def make_boards(
    group: dist.ProcessGroup,
    machines: Sequence[Sequence[int]],
    row_sizes: Sequence[int],
    deadline: Deadline,
) -> tuple[list[list[int]], Machine]:
    """Shares memory within each machine. Every rank of the group calls it.

    Some containers and users let a rank see another one's memory and some do not, so ranks try and
    tell. Those of a machine of which one cannot are machines of one rank each.

    Args:
        row_sizes: of the boards.

    Returns:
        The machines as they are, and this rank's.
    """
    here = next(list(ranks) for ranks in machines if group.rank() in ranks)
    place, seconds = here.index(group.rank()), deadline.seconds
    boards: list[_C.SharedBoard | None] = []
    if place == 0 and len(here) > 1:
        boards = [_C.SharedBoard.create(len(here), size, seconds) for size in row_sizes]
    addresses = _gather([board.address if board else "" for board in boards], group, deadline)
    if place > 0:
        boards = [_C.SharedBoard.open(told, place, seconds) for told in addresses[here[0]]]
    share = _gather(bool(boards) and all(boards), group, deadline)
    found: list[list[int]] = []
    for ranks in machines:
        together = all(share[rank] for rank in ranks)
        found += [list(ranks)] if together else [[rank] for rank in ranks]
    found.sort()
    mine = next(ranks for ranks in found if group.rank() in ranks)
    shared = [board for board in boards if board is not None] if len(mine) > 1 else []
    return found, Machine(mine, shared)


def make_board(
    group: dist.ProcessGroup, row_size: int, deadline: Deadline
) -> _C.SharedBoard | None:
    """Memory shared by all of a group's ranks, None if one cannot reach it or there is but one.

    Every rank of the group calls it.
    """
    candidates = find_machines(group, deadline)
    machines, machine = make_boards(group, candidates, [row_size], deadline)
    return next(iter(machine.boards), None) if len(machines) == 1 else None


def _gather(value: Any, group: dist.ProcessGroup, deadline: Deadline) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    deadline.wait("sharing memory", lambda: dist.all_gather_object(everyone, value, group=group))
    return everyone
