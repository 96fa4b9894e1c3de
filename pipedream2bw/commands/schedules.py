"""``pipedream2bw schedules``: lists them and what sizes they need."""

from __future__ import annotations

import argparse
from typing import Any

from .._C import schedule_methods
from .table import table


def add_schedules_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    schedules = commands.add_parser(
        "schedules",
        help="list the schedules and the sizes that they need",
        description="Lists the schedules and the sizes that they need.",
    )
    schedules.set_defaults(run=_list_schedules)


def _list_schedules(given: argparse.Namespace) -> None:
    rows = [(method.name, "; ".join(method.size_rules)) for method in schedule_methods()]
    print(table("sizes that the schedules need", ("schedule", "rules"), rows))
