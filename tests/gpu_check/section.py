"""What a section of the check is, and the rows that it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Status = Literal["pass", "FAIL", "not measured", "not there", "noted"]

NO_TIME = "no time was left"

KEPT = 20_000
"""Characters of a detail, of which a failed process's output is one."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A question to the device.

    Attributes:
        seconds: after so many the section has failed; more where others have left time.
        passes_if: what its rows say, for the table.
        function: "module:name", called with a ``Device`` and ``Rows``.
        environment: variables of its process.
    """

    name: str
    seconds: float
    passes_if: str
    function: str
    environment: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One answer. A limit is part of the name's meaning: ``value`` must be within it."""

    name: str
    status: Status
    value: float | None = None
    limit: str = ""
    detail: str = ""


class Rows:
    """Writes each row at once: what a section has found is kept if it hangs later.

    Args:
        measures: the device is one whose figures mean something. Of another a figure is taken, to
            see that it can be, and not written down.
        seconds: after so many the section has failed.
        pictures: a folder for what a section draws; None: nobody wants it.
    """

    def __init__(
        self,
        path: Path,
        *,
        measures: bool,
        seconds: float = math.inf,
        pictures: Path | None = None,
    ) -> None:
        self._path = path
        self._measures = measures
        self._end = time.monotonic() + seconds
        self._writing = threading.Lock()  # several threads may ask
        self.pictures = pictures

    @property
    def seconds_left(self) -> float:
        """Until the section has failed."""
        return self._end - time.monotonic()

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self._write(Row(name, "pass" if passed else "FAIL", detail=detail))

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        detail: str = "",
    ) -> None:
        """Without a limit the figure is for information. NaN is within none."""
        limits = [f"<= {at_most:g}"] if at_most is not None else []
        limits += [f">= {at_least:g}"] if at_least is not None else []
        limit = ", ".join(limits)
        if not self._measures:
            self._write(Row(name, "not measured", limit=limit))
            return
        within = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        status: Status = "noted" if not limits else "pass" if within else "FAIL"
        self._write(Row(name, status, value, limit, detail))

    def absent(self, name: str, why: str) -> None:
        """What the section asks about does not exist here, and says so itself."""
        self._write(Row(name, "not there", detail=why))

    def has_time(self, name: str, seconds: float) -> bool:
        """Tells whether the section has so many left; if not, a row of that name says so."""
        if self.seconds_left >= seconds:
            return True
        self.absent(name, NO_TIME)
        return False

    def note(self, name: str, detail: str) -> None:
        self._write(Row(name, "noted", detail=detail))

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What raises inside is a row that fails; the section's others are asked all the same."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}")

    def _write(self, row: Row) -> None:
        row = dataclasses.replace(row, detail=row.detail[:KEPT])
        with self._writing, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")


class Pace:
    """Begins no more of what a section asks than it has time for, by what the last one took."""

    MORE, AT_LEAST = 1.5, 2.0
    """How many times as long the next one may take, and seconds for a section's end."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._taken = 0.0
        self._begun: float | None = None

    def has_time(self, name: str) -> bool:
        """To be called before each; if there is none for it, a row of that name says so."""
        now = time.monotonic()
        if self._begun is not None:
            self._taken = now - self._begun
        has = self._rows.has_time(name, self.MORE * self._taken + self.AT_LEAST)
        self._begun = now if has else None
        return has


def read_rows(path: Path) -> list[Row]:
    """All that were written; one that is being written now is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [Row(**json.loads(line)) for line in whole.splitlines()]
