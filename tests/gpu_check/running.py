"""Runs one section in a process of its own, for as long as it may."""

from __future__ import annotations

import dataclasses
import importlib
import re
import tempfile
import time
import traceback
from pathlib import Path

from tests.runs.launch import RankError, run_ranks

from .section import Row, Rows, Section, read_rows

KEPT = 20_000
"""Characters of a failed section's output."""


@dataclasses.dataclass
class Outcome:
    """What became of a section."""

    name: str
    passes_if: str
    seconds: float
    rows: list[Row]
    failure: str = ""
    """Why the section itself failed; its rows may have failed besides."""
    output: str = ""

    @property
    def status(self) -> str:
        statuses = {row.status for row in self.rows}
        if self.failure or "FAIL" in statuses:
            return "FAIL"
        if "pass" in statuses:
            return "pass"
        for status in ("not measured", "noted", "not there"):
            if status in statuses:
                return status
        return "FAIL"  # it has said nothing


def run_section(section: Section, device_type: str, seconds: float) -> Outcome:
    """Ends it after ``seconds``; then the stacks of all threads are in the output."""
    start = time.monotonic()
    failure = output = ""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "rows"
        try:
            run_ranks(
                answer,
                1,
                args=(section.function, device_type, str(path)),
                timeout=seconds,
                env=dict(section.environment),
                rendezvous="none",
            )
        except RankError as error:
            (result,) = error.results
            output = (result.stdout + result.stderr)[-KEPT:]
            failure = _reason(str(error).splitlines()[0], output, seconds)
        rows = read_rows(path)
    if not rows and not failure:
        failure = "no row was written"
    taken = time.monotonic() - start
    return Outcome(section.name, section.passes_if, taken, rows, failure, output)


def _reason(of_launch: str, output: str, seconds: float) -> str:
    if "did not end" in of_launch:
        return f"hangs: not done after {seconds:.0f} s"
    lines = [
        line for line in output.splitlines() if re.match(r"[\w.]*(Error|Exception|Lost)\b", line)
    ]
    return lines[-1] if lines else of_launch


def answer(rank: int, world_size: int, function: str, device_type: str, path: str) -> None:
    """In the section's process."""
    from .device import open_device, unordered_accesses

    device = open_device(device_type)
    rows = Rows(Path(path), measures=device.is_gpu)
    module, _, name = function.partition(":")
    run = getattr(importlib.import_module(module), name)
    try:
        run(device, rows)
    except Exception as error:
        traceback.print_exc()
        rows.check("no error", False, f"{type(error).__name__}: {error}")
        raise
    finally:
        if device_type == "checked":
            races = unordered_accesses(device)
            rows.check("every access is ordered", not races, "\n".join(races[:3]))
