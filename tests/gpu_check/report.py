"""The results: as a JSON file that is whole at any time, and as a table on the terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from .running import Outcome


class Report:
    """All outcomes, written to a file after every row: whoever stops the check keeps what it found.

    Args:
        path: of the file; None: there is none.
        where: what stands before the sections.
    """

    def __init__(self, path: Path | None, where: dict[str, Any]) -> None:
        self.outcomes: list[Outcome] = []
        self._path = path
        self._where = where
        self._writing = threading.Lock()  # rows are told by threads

    def put(self, outcome: Outcome) -> None:
        """Adds a section's outcome, or says that it has changed."""
        with self._writing:
            if not any(each is outcome for each in self.outcomes):
                self.outcomes.append(outcome)
            if self._path is not None:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        sections = [dataclasses.asdict(each) | {"status": each.status} for each in self.outcomes]
        text = json.dumps({**self._where, "sections": sections}, indent=1)
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:  # what is on the terminal is there all the same
            print(f"{path}: {error}", file=sys.stderr, flush=True)


def show(outcome: Outcome) -> None:
    """The section's part of the table."""
    print(f"\n{outcome.name:14} {outcome.status:13} {outcome.seconds:5.1f} s   {outcome.passes_if}")
    width = max((len(row.name) for row in outcome.rows), default=0)
    for row in outcome.rows:
        value = "" if row.value is None else f"{row.value:.4g}"
        first, *more = row.detail.splitlines() or [""]
        line = f"    {row.name:{width}}  {row.status:12}  {value:>9} {row.limit:8} {first}"
        print(line.rstrip())
        if row.status == "FAIL":
            print(*(f"        {text}" for text in more), sep="\n")
    if outcome.failure:
        print(f"    FAIL: {outcome.failure}")
        print(outcome.output)
    sys.stdout.flush()


def summary(outcomes: list[Outcome]) -> None:
    print(f"\n{'section':14} {'result':13} {'seconds':>8}   passes if")
    for outcome in outcomes:
        head = f"{outcome.name:14} {outcome.status:13} {outcome.seconds:8.1f}"
        print(f"{head}   {outcome.passes_if}")
    sys.stdout.flush()
