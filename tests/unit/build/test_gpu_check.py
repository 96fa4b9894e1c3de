"""The check of a GPU notices each way in which a section can fail."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_check import __main__ as command
from tests.gpu_check.device import Device
from tests.gpu_check.running import Outcome, run_section
from tests.gpu_check.section import Rows, Section, read_rows
from tests.gpu_check.sections import BUILD, SECTIONS


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


@pytest.mark.parametrize("why", ["the build", "the deadline"])
def test_what_is_not_begun_has_failed(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def built(device: str, seconds: float) -> Outcome:
        return Outcome("build", "", 0.0, [], "no compiler" if why == "the build" else "")

    path = tmp_path / "out.json"
    monkeypatch.setattr(command, "build", built)
    monkeypatch.setattr(
        sys, "argv", ["check", "--device", "checked", "--json", str(path), "--seconds", "4"]
    )
    assert command.main() == 1
    sections = json.loads(path.read_text())["sections"][1:]
    assert len(sections) == len(SECTIONS)
    assert all(each["status"] == "FAIL" for each in sections)
    assert all("not begun" in each["failure"] for each in sections)
