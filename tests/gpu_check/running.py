"""Runs one section in a process of its own, for as long as it may."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.runs.launch import RankError, run_ranks

from .ranks import reason
from .section import KEPT, Row, Rows, Section, read_rows

LOOKS_EVERY = 0.2  # seconds, for new rows


@dataclasses.dataclass
class Outcome:
    """What became of a section, or has until now."""

    name: str
    passes_if: str
    seconds: float
    rows: list[Row]
    failure: str = ""
    """Why the section itself failed; its rows may have failed besides."""
    output: str = ""
    is_running: bool = False

    @property
    def status(self) -> str:
        statuses = {row.status for row in self.rows}
        if self.failure or "FAIL" in statuses:
            return "FAIL"
        if self.is_running:
            return "running"
        if "pass" in statuses:
            return "pass"
        for status in ("not measured", "noted", "not there"):
            if status in statuses:
                return status
        return "FAIL"  # it has said nothing


Changed = Callable[[Outcome], object]
"""Is told of an outcome after every row."""


class Recorded:
    """What a section writes, while it does and when it is done.

    Args:
        changed: is called with the outcome after every row, in a thread of this one's.
    """

    def __init__(self, section: Section, changed: Changed) -> None:
        self.outcome = Outcome(section.name, section.passes_if, 0.0, [], is_running=True)
        self._changed = changed
        self._start = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / "rows"

    @contextlib.contextmanager
    def followed(self) -> Iterator[Outcome]:
        """Inside the section runs. What raises is its failure, but for an interrupt's."""
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(ended,), name="rows", daemon=True)
        thread.start()
        try:
            yield self.outcome
        except Exception as error:
            self.outcome.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self.outcome.output = traceback.format_exc()[-KEPT:]
        except BaseException:
            self.outcome.failure = "interrupted"
            raise
        finally:
            ended.set()
            thread.join()
            self.outcome.is_running = False
            self._look()
            if not self.outcome.rows and not self.outcome.failure:
                self.outcome.failure = "no row was written"
            self._folder.cleanup()
            self._changed(self.outcome)

    def _follow(self, ended: threading.Event) -> None:
        self._changed(self.outcome)
        while not ended.wait(LOOKS_EVERY):
            if self._look():
                self._changed(self.outcome)

    def _look(self) -> bool:
        """Tells whether there is a new row."""
        rows = read_rows(self.path)
        is_new = len(rows) > len(self.outcome.rows)
        self.outcome.rows = rows
        self.outcome.seconds = time.monotonic() - self._start
        return is_new


def run_section(
    section: Section,
    device_type: str,
    seconds: float,
    *,
    changed: Changed = lambda outcome: None,
    pictures: Path | None = None,
) -> Outcome:
    """Ends it after ``seconds``; then the stacks of all threads are in the output.

    Whatever is raised meanwhile, here or in its process, is the section's failure.
    """
    recorded = Recorded(section, changed)
    end = time.time() + seconds  # of a clock that processes share
    with recorded.followed() as outcome:
        try:
            run_ranks(
                answer,
                1,
                args=(section.function, device_type, str(recorded.path), end, pictures),
                timeout=seconds,
                env=dict(section.environment),
                rendezvous="none",
                fresh=device_type == "cuda",
            )
        except RankError as error:
            outcome.output = "".join(f"{r.stdout}{r.stderr}" for r in error.results)[-KEPT:]
            outcome.failure = reason(error)
            if "did not end" in outcome.failure:
                outcome.failure = f"hangs: not done after {seconds:.0f} s"
    return recorded.outcome


def answer(
    rank: int,
    world_size: int,
    function: str,
    device_type: str,
    path: str,
    end: float,
    pictures: Path | None,
) -> None:
    """In the section's process."""
    from .device import open_device, unordered_accesses

    device = open_device(device_type)
    seconds = end - time.time()
    rows = Rows(Path(path), measures=device.is_gpu, seconds=seconds, pictures=pictures)
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
