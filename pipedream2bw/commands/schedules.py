"""``pipedream2bw schedules``: lists them and what they need."""

from __future__ import annotations

import argparse
from typing import Any

from ..schedules.load import make_schedule, schedule_names
from ..schedules.simulate import find_deadlock

_EXAMPLE_STAGES = 4  # of the rules that are shown


def add_schedules_command(commands: Any) -> None:
    """Adds the command to those of a parser."""
    schedules = commands.add_parser(
        "schedules",
        help="list the schedules and what they need",
        description="Lists the schedules, what sizes they need, and whether they deadlock with "
        "rendezvous sends, where a rank that sends waits until its message is received "
        f"(looked at with {_EXAMPLE_STAGES} ranks). This package's sends never wait for their "
        "receivers.",
    )
    schedules.set_defaults(run=_list_schedules)


def _list_schedules(given: argparse.Namespace) -> None:
    names = schedule_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {'; '.join([*_rules(name), _with_rendezvous(name)])}")


def _rules(name: str) -> list[str]:
    """What the generator demands of small numbers of microbatches, one and two stages a rank."""
    rules: list[str] = []
    for stages_per_rank in (1, 2):
        for num_microbatches in range(1, 2 * _EXAMPLE_STAGES):
            try:
                make_schedule(name, _EXAMPLE_STAGES, num_microbatches, stages_per_rank)
            except ValueError as error:
                values, rule = str(error).rsplit(": ", 1)
                if values.startswith("stages_per_rank"):
                    return [*(rules or ["any num_microbatches"]), "stages_per_rank 1"]
                rule = rule.removeprefix(f"{name} ")
                if rule.rpartition(">= ")[2].isdigit():  # a rule without a short formula
                    rule += f" for {_EXAMPLE_STAGES} stages, {stages_per_rank} on a rank"
                if rule not in rules:
                    rules.append(rule)
    return [*(rules or ["any num_microbatches"]), "any stages_per_rank"]


def _with_rendezvous(name: str) -> str:
    """Of the sizes that the schedule allows several stages a rank, and many microbatches."""
    for stages_per_rank in (2, 1):
        for num_microbatches in (2 * _EXAMPLE_STAGES, 1):
            num_stages = _EXAMPLE_STAGES * stages_per_rank
            try:
                schedule = make_schedule(name, num_stages, num_microbatches, stages_per_rank)
            except ValueError:
                continue
            return (
                "runs with rendezvous sends"
                if find_deadlock(schedule) is None
                else "deadlocks with rendezvous sends"
            )
    raise AssertionError(f"{name}: none of the sizes is legal")
