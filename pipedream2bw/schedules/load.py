"""Schedules from what users give: a name, a text, a path or a schedule."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import _C
from .._C import Schedule
from ..checks import check_whole_number
from ..rules import instance

make_schedule = _C.make_schedule


schedule_names = _C.schedule_names


def load_schedule(source: Schedule | str | os.PathLike[str]) -> Schedule:
    """Loads and checks a schedule of your own.

    Args:
        source: a schedule, its text form (several lines, as ``str(schedule)`` gives), the
            compute-only CSV of torch.distributed.pipelining, or the path of a file with either.

    Raises:
        ValueError: the text is malformed (names line and column), or the schedule is illegal (names
            the rule and shows the grid with the offending cell marked).
        OSError: the file cannot be read.
    """
    if not isinstance(source, Schedule):
        path = None if isinstance(source, str) and "\n" in source else Path(source)
        try:
            text = str(source) if path is None else path.read_text(encoding="utf-8")
            source = _C.schedule_from_text(text)
        except ValueError as error:
            if path is None:
                raise
            raise ValueError(f"{path}: {error}") from None
    source.validate()
    return source


def fingerprint(schedule: Schedule) -> str:
    """Returns a schedule's name and a digest of its text: ranks may have read different files."""
    digest = hashlib.blake2b(str(schedule).encode(), digest_size=4).hexdigest()
    return f"{schedule.name} ({digest})"


def check_room(slots: int, late: Sequence[int], num_microbatches: int) -> None:
    """Raises ValueError if more forwards of a batch would be late than it has.

    Args:
        slots: of an update, for which so many forwards of each stage would be.
    """
    if max(late) > num_microbatches:
        raise ValueError(
            f"update_slots: {slots}, num_microbatches: {num_microbatches}: {max(late)} forwards of "
            f"a batch would be late on stage {list(late).index(max(late))}, and all are under 2bw. "
            f"Give num_microbatches={max(late)} or more, or fewer slots"
        )


def warn_without_delay(schedule: Schedule, rank: int, options: Mapping[str, object]) -> None:
    """Warns on rank 0 of options for the delay that were given to a schedule without one.

    So one word changes the schedule of a script.
    """
    given = [f"{name}: {value}" for name, value in options.items() if value]
    if given and rank == 0 and not any(schedule.delay):
        warnings.warn(
            f'{", ".join(given)}, schedule: "{schedule.name}": without a delay this does nothing. '
            'Leave it out, or choose a schedule with a delay, such as "2bw_fresh"',
            stacklevel=3,  # where the constructor is called
        )


def schedule_for(
    given: Schedule | str | os.PathLike[str],
    num_stages: int | None,
    num_microbatches: int | None,
    stages_per_rank: int = 1,
) -> Schedule:
    """The checked schedule for a pipeline of these sizes; a string on one line is a name.

    A schedule of one's own has its sizes: None is any.

    Raises:
        TypeError: it is none of the kinds that a schedule is given as, or a size is no int.
        ValueError: the method's rule, or the schedule's own sizes, forbid these.
    """
    kinds = instance("a name, a text, a path or a Schedule", str, os.PathLike, Schedule)
    kinds.check("schedule", given)
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    for name, size in {**sizes, "stages_per_rank": stages_per_rank}.items():
        if size is not None:
            check_whole_number(name, size)
    if isinstance(given, str) and "\n" not in given:
        if num_stages is None or num_microbatches is None:
            missing = [name for name, size in sizes.items() if size is None]
            raise ValueError(
                f"{' and '.join(missing)} missing, schedule: {given!r}: a schedule by name needs "
                "num_stages and num_microbatches"
            )
        schedule = make_schedule(given, num_stages, num_microbatches, stages_per_rank)
        schedule.validate()
        return schedule
    schedule = load_schedule(given)
    own_sizes = {"num_stages": schedule.depth, "num_microbatches": schedule.total_microbatches}
    for name, size in sizes.items():
        if size not in (None, own_sizes[name]):
            raise ValueError(
                f"{name}: {size}, of the given schedule: {own_sizes[name]}: they must be equal"
            )
    if stages_per_rank != 1:
        raise ValueError(
            f"stages_per_rank: {stages_per_rank}, it must be left out with a schedule of one's "
            f"own, whose placement is {schedule.placement}"
        )
    return schedule
