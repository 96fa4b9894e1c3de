"""Processes that share the device, and why they failed."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.runs.launch import RankError, RankResult, run_ranks

from .section import Rows

if TYPE_CHECKING:  # the check's own process imports no torch
    from .device import Device

RAISED = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Lost|Timeout)\b.*)", re.M)
"""A traceback's last line, as Python and as torch's processes write it."""

LAST, MOST = 3.0, 90.0  # seconds before the section's end, and for processes at most


def on_ranks(
    device: Device,
    rows: Rows,
    name: str,
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float,
    **options: Any,
) -> list[RankResult] | None:
    """What the ranks left, whose function is given the device's type and ``args``.

    None, with a row of that name that says so, where they failed. On a GPU none of them is forked.
    """
    try:
        return run_ranks(
            function,
            world_size,
            args=(device.type, *args),
            timeout=seconds,
            fresh=device.is_gpu,
            **options,
        )
    except RankError as error:
        rows.check(name, False, f"{reason(error)}\n{error}")
        return None


def patience(rows: Rows) -> float:
    """Seconds for processes that leave the section the time to say what became of them."""
    return max(1.0, min(rows.seconds_left - LAST, MOST))


def together(device: Device, asked: Sequence[Callable[[], None]]) -> None:
    """Calls all of them, each of which starts processes; on a GPU at once, in threads.

    There to start them takes most of the time. Where they are forked, it is of a process that this
    thread has started, and that lives as long as the thread.
    """
    if not device.is_gpu:
        for each in asked:
            each()
        return
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        for begun in [pool.submit(each) for each in asked]:
            begun.result()


def reason(error: RankError) -> str:
    """One line: the exception of the rank that failed first, or what the launcher says."""
    of_launch = str(error).splitlines()[0]
    if "did not end" in of_launch:
        return of_launch
    for result in sorted(error.results, key=lambda each: each.ended):
        found = RAISED.findall(result.stdout + result.stderr) if result.exit_code != 0 else []
        if found:
            return str(found[-1])
    return of_launch
