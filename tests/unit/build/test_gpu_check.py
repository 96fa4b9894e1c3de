"""The check of a GPU notices each way in which a section can fail."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.gpu_check import __main__ as command
from tests.gpu_check import running
from tests.gpu_check.device import Device
from tests.gpu_check.ranks import LAST, MOST, patience
from tests.gpu_check.running import Changed, Outcome, run_section
from tests.gpu_check.section import Row, Rows, Section, read_rows
from tests.gpu_check.sections import BUILD, PARTS, SECTIONS


def section(function: str, name: str = "made") -> Section:
    return Section(name, 60.0, "it passes", f"{__name__}:{function}")


def passes(device: Device, rows: Rows) -> None:
    rows.check("a check", True)


def raises(device: Device, rows: Rows) -> None:
    rows.check("before", True)
    raise ZeroDivisionError("on purpose")


def says_nothing(device: Device, rows: Rows) -> None:
    """Neither passes nor fails."""


def hangs_somewhere(device: Device, rows: Rows) -> None:
    rows.check("before", True)
    time.sleep(60)


def misses(device: Device, rows: Rows) -> None:
    rows.check("a check", False, "why")


def test_every_section_has_a_function() -> None:
    for each in (BUILD, *SECTIONS):
        module, _, name = each.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("function", "status", "failure"),
    [
        ("passes", "pass", ""),
        ("misses", "FAIL", ""),
        ("raises", "FAIL", "ZeroDivisionError: on purpose"),
        ("says_nothing", "pass", ""),  # that accesses are ordered is an answer
    ],
)
def test_a_section_is_what_its_process_says(function: str, status: str, failure: str) -> None:
    outcome = run_section(section(function), "checked", 60.0)
    assert (outcome.status, outcome.failure) == (status, failure)


def test_a_section_that_hangs_fails_with_its_stacks_and_keeps_its_rows() -> None:
    outcome = run_section(section("hangs_somewhere"), "checked", 12.0)
    assert outcome.failure.startswith("hangs")
    assert outcome.status == "FAIL"
    assert "hangs_somewhere" in outcome.output
    assert [row.name for row in outcome.rows] == ["before"]


def test_figures_are_judged_where_they_mean_something(tmp_path: Path) -> None:
    measured, other = Rows(tmp_path / "a", measures=True), Rows(tmp_path / "b", measures=False)
    for rows in (measured, other):
        rows.figure("within", 1.0, at_most=1.03)
        rows.figure("over", 1.04, at_most=1.03)
        rows.figure("under", 0.8, at_least=0.9)
        rows.figure("no number", float("nan"), at_most=1.0)
        rows.figure("for information", 7.0)
    assert [row.status for row in read_rows(tmp_path / "a")] == [
        *("pass", "FAIL", "FAIL", "FAIL", "noted")
    ]
    assert {row.status for row in read_rows(tmp_path / "b")} == {"not measured"}
    assert {row.value for row in read_rows(tmp_path / "b")} == {None}


def test_a_section_that_says_nothing_has_failed() -> None:
    assert Outcome("made", "", 1.0, []).status == "FAIL"


def waits_for_the_report(device: Device, rows: Rows) -> None:
    """Passes once the JSON has the row that it has written, while it still runs."""
    rows.check("written before", True)
    assert rows.pictures is not None
    end = time.monotonic() + 30
    while time.monotonic() < end:
        (outcome,) = json.loads((rows.pictures / "out.json").read_text())["sections"][1:] or [{}]
        if [row["name"] for row in outcome.get("rows", [])] == ["written before"]:
            rows.check("it is in the report", outcome["status"] == "running", outcome["status"])
            return
        time.sleep(0.05)


def guards(device: Device, rows: Rows) -> None:
    with rows.guarded("a row"):
        raise ZeroDivisionError("on purpose")
    rows.check("the one behind it", True)


def command_on(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *sections: Section,
    failure: str = "",
    options: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """What the check writes about these sections, by a build of this outcome."""

    def built(device: str, left: float, *, builds: bool, changed: Changed) -> Outcome:
        outcome = Outcome("build", "", 0.0, [Row("built", "pass")], failure)
        changed(outcome)
        return outcome

    monkeypatch.setattr(command, "build", built)
    monkeypatch.setattr(command, "SECTIONS", sections)
    monkeypatch.setattr(
        sys, "argv", ["check", "--device", "checked", "--json", str(path), *options]
    )
    code = command.main()
    found: list[dict[str, Any]] = json.loads(path.read_text())["sections"][1:]
    assert code == int(any(each["status"] == "FAIL" for each in found) or bool(failure))
    return found


@pytest.mark.parametrize("why", ["the deadline", *exhaustive("the build")])
def test_what_is_not_begun_has_failed(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = command_on(
        tmp_path / "out.json",
        monkeypatch,
        *SECTIONS,
        failure="no compiler" if why == "the build" else "",
        options=("--seconds", "60" if why == "the build" else "4"),
    )
    assert len(found) == len(SECTIONS)
    assert all(each["status"] == "FAIL" for each in found)
    assert all("not begun" in each["failure"] for each in found)


def test_whatever_is_raised_while_a_section_is_started_is_its_failure_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the ValueError of a process to fork from, which says no number."""
    run_ranks = running.run_ranks

    def start(*args: Any, **options: Any) -> Any:
        if options["args"][0].endswith("misses"):
            raise ValueError("no process")
        return run_ranks(*args, **options)

    monkeypatch.setattr(running, "run_ranks", start)
    found = command_on(
        tmp_path / "out.json", monkeypatch, section("misses", "first"), section("passes", "second")
    )
    assert [each["status"] for each in found] == ["FAIL", "pass"]
    assert found[0]["failure"] == "ValueError: no process"


def test_an_interrupt_ends_the_check_with_all_that_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_ranks = running.run_ranks

    def start(*args: Any, **options: Any) -> Any:
        if options["args"][0].endswith("misses"):
            raise KeyboardInterrupt
        return run_ranks(*args, **options)

    monkeypatch.setattr(running, "run_ranks", start)
    names = {"first": "passes", "second": "misses", "third": "passes"}
    sections = [section(function, name) for name, function in names.items()]
    found = command_on(tmp_path / "out.json", monkeypatch, *sections)
    assert [each["status"] for each in found] == ["pass", "FAIL", "FAIL"]
    failures = ["", "interrupted", "not begun: interrupted"]
    assert [each["failure"] for each in found] == failures


def test_the_report_is_written_after_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (found,) = command_on(tmp_path / "out.json", monkeypatch, section("waits_for_the_report"))
    assert [row["name"] for row in found["rows"]][:2] == ["written before", "it is in the report"]
    assert found["status"] == "pass"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # and nothing half written


def test_a_row_that_raises_fails_and_the_one_behind_it_is_asked() -> None:
    outcome = run_section(section("guards"), "checked", 60.0)
    assert [(row.name, row.status) for row in outcome.rows][:2] == [
        ("a row", "FAIL"),
        ("the one behind it", "pass"),
    ]
    assert outcome.rows[0].detail == "ZeroDivisionError: on purpose"


def test_the_parts_make_up_the_whole() -> None:
    assert tuple(each for part in PARTS.values() for each in part) == SECTIONS
    assert len({each.name for each in SECTIONS}) == len(SECTIONS)


def test_a_section_may_take_what_others_need_not_up_to_as_much_again() -> None:
    first, second, third = (Section("made", seconds, "", "") for seconds in (20.0, 30.0, 40.0))
    assert command.limit_of(first, [second, third], left=90.0) == 20
    assert command.limit_of(first, [second, third], left=95.0) == 25
    assert command.limit_of(first, [second, third], left=500.0) == 40
    assert command.limit_of(third, [], left=12.0) == 12
    assert command.limit_of(first, [second, third], left=25.0) == 20
    assert command.limit_of(first, [second, third], left=-5.0) == 0


@pytest.mark.parametrize(
    ("left", "seconds"),
    [(math.inf, MOST), (40.0, 40.0 - LAST), (12.0, 12.0 - LAST), (LAST, 1.0), (-5.0, 1.0)],
)
def test_processes_end_before_their_section_does(
    left: float, seconds: float, tmp_path: Path
) -> None:
    rows = Rows(tmp_path / "rows", measures=True, seconds=left)
    assert patience(rows) == pytest.approx(seconds, abs=0.5)


def test_the_check_itself_imports_no_torch() -> None:
    """It may be broken, or start threads, or touch the GPU that its processes are to use."""
    asked = "import sys, tests.gpu_check.__main__; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_time_is_taken_until_other_threads_have_given_the_device_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline's calls return before: the device may be idle when it is asked."""
    did: list[str] = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: did.append("synchronize"))
    Device("cpu", "").seconds_of(
        lambda: did.append("work"), times=2, finish=lambda: did.append("finish")
    )
    once = ["work", "finish", "synchronize"]
    assert did == [*once, "work", *once]
