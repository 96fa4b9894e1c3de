"""``pipedream2bw schedules``: lists them and the numbers of microbatches that they allow."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from ..schedules.load import make_schedule, schedule_names
from .table import table

_RANKS = 4  # of the example


def add_schedules_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    schedules = commands.add_parser(
        "schedules",
        help="list the schedules and the numbers of microbatches that they allow",
        description="Lists the schedules and, for an example, the numbers of microbatches that "
        "they allow.",
    )
    schedules.set_defaults(run=_list_schedules)


def _list_schedules(given: argparse.Namespace) -> None:
    rows = [(name, _allowed(name, 1), _allowed(name, 2)) for name in schedule_names()]
    title = f"numbers of microbatches that a batch may have, on {_RANKS} ranks"
    print(table(title, ("schedule", "1 stage on each rank", "2 stages on each rank"), rows))


def _allowed(name: str, stages_per_rank: int) -> str:
    """The first few numbers of microbatches that a schedule allows."""

    def is_allowed(num_microbatches: int) -> bool:
        try:
            make_schedule(name, _RANKS * stages_per_rank, num_microbatches, stages_per_rank)
        except ValueError:
            return False
        return True

    found = list(itertools.islice(filter(is_allowed, range(1, 8 * _RANKS)), 4))
    more = ", ..." if len(found) > 3 else ""
    return ", ".join(map(str, found[:3])) + more or "-"
