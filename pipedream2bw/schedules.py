"""A schedule from what the user gives: a name, a text, a path or a schedule."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from . import _C
from ._C import Schedule

__all__ = ["Schedule", "load_schedule", "make_schedule", "schedule_names"]

make_schedule = _C.make_schedule
schedule_names = _C.schedule_names


def load_schedule(source: Schedule | str | os.PathLike[str]) -> Schedule:
    """A schedule of one's own, checked.

    Args:
        source: a schedule, its text form (several lines, as ``str(schedule)`` gives), the
            compute-only CSV of torch.distributed.pipelining, or the path of a file with either.

    Raises:
        ValueError: the text is malformed (names line and column), or the schedule is illegal (names
            the rule and shows the grid with the offending cell marked).
        OSError: the file cannot be read.
    """
    if not isinstance(source, Schedule):
        is_text = isinstance(source, str) and "\n" in source
        text = str(source) if is_text else Path(source).read_text()
        source = _C.schedule_from_text(text)
    source.validate()
    return source


def fingerprint(schedule: Schedule) -> str:
    """Its name and a digest of its text: ranks may have read files that differ."""
    digest = hashlib.blake2b(str(schedule).encode(), digest_size=4).hexdigest()
    return f"{schedule.name} ({digest})"


def schedule_for(
    given: Schedule | str | os.PathLike[str],
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int,
) -> Schedule:
    """The schedule for a pipeline of these sizes; a string on one line is a name.

    Raises:
        ValueError: the method's rule, or the schedule's own sizes, forbid these; or the engine does
            not run it.
    """
    if isinstance(given, str) and "\n" not in given:
        schedule = make_schedule(given, num_stages, num_microbatches, stages_per_rank)
        schedule.validate()
    else:
        schedule = load_schedule(given)
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
        for name, size in sizes.items():
            if size != getattr(schedule, name):
                raise ValueError(
                    f"{name}: {size}, of the given schedule: {getattr(schedule, name)}: they must "
                    "be equal"
                )
        if stages_per_rank != 1:
            raise ValueError(
                f"stages_per_rank: {stages_per_rank}, it must be left out with a schedule of one's "
                f"own, whose placement is {schedule.placement}"
            )
    if schedule.is_split:
        raise ValueError(
            f'schedule: "{schedule.name}" has I and W: the engine does not run split backwards'
        )
    return schedule
