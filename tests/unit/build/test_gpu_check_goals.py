"""The documents' tables say what a JSON of results says, and nothing that it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_check import __main__ as command
from tests.gpu_check import building
from tests.gpu_check.goals import GOALS, tables
from tests.gpu_check.sections import BUILD, SECTIONS


def row(name: str, status: str, value: float | None = None, detail: str = "") -> dict[str, Any]:
    return {"name": name, "status": status, "value": value, "limit": "", "detail": detail}


def written(path: Path, **sections: list[dict[str, Any]]) -> Path:
    found = [
        {"name": name.replace("_", " "), "status": "pass", "rows": rows}
        for name, rows in sections.items()
    ]
    where = {"device": "NVIDIA H100 80GB HBM3, 580.65", "torch": "2.11.0+cu130 13.0"}
    path.write_text(json.dumps({**where, "sections": found}))
    return path


def cells(text: str, what: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_table_has_the_devices_name_and_what_was_measured(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.json",
        bandwidth=[
            row("SGD: bandwidth / a copy's", "pass", 0.95),
            row("AdamW: bandwidth / a copy's", "FAIL", 0.8714),
            row("AdamW: TB/s", "noted", 2.9),
            row("AdamW: 200 runs / one", "pass", 1.0),
        ],
        one_stage=[
            row("d = 1 / unsplit", "pass", 1.012),
            row("with graphs: launching a microbatch of six blocks, s", "pass", 21.4e-6),
        ],
        ring=[row("the device's shared memory: as the unsplit model", "pass", None, "1.2e-08")],
        waits=[row("with clipping: the caller's waits", "FAIL", None, "3")],
        memory=[row("2bw, float32: peak / report", "not measured")],
    )
    text = tables(path)
    assert "measured on NVIDIA H100 80GB HBM3, 580.65, torch 2.11.0+cu130 13.0" in text
    expected = {
        "a fused optimizer step / a copy of as many bytes, rate": "0.871 to 0.950 (missed)",
        "a step over 200 runs of parameters / over one, time": "1.000",
        "d = 1 / the unsplit model with accumulated gradients, time": "1.012",
        "clipping by norm / none, time": "not measured",
        "launching a microbatch of six blocks, with CUDA graphs": "21 µs",
        "the allocator's peak / `memory_report()`": "not measured",
        "the caller's waits for the device": "3 (missed)",
    }
    for what, measured in expected.items():
        assert cells(text, what)[1] == measured
    ring = "two processes by shared memory of the device, distance from the unsplit model"
    assert cells(text, ring) == ["≤ 1e-6", "1.2e-08"]


def test_a_row_that_failed_before_it_had_a_figure_is_not_measured_and_missed(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "a.json", bandwidth=[row("SGD", "FAIL", None, "RuntimeError: no")])
    assert cells(tables(path), GOALS[0].what)[1] == "not measured"


def test_trainings_are_told_side_by_side(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.json",
        train=[
            row("unsplit: tokens/s", "noted", 350123.4),
            row("unsplit: memory, GiB", "noted", 8.04),
            row("unsplit: loss of step 1", "noted", 10.9),
            row("threads, d = 2: tokens/s", "noted", 340000.0),
            row("threads, d = 2: tokens/s / unsplit's", "noted", 0.971),
            row("two processes, d = 2", "not there", None, "no time was left"),
        ],
    )
    text = tables(path)
    none = "not measured"
    assert cells(text, "unsplit") == ["350,123", none, "8.0", "10.900", none, none]
    assert cells(text, "threads, d = 2") == ["340,000", "0.97", none, none, none, none]


def test_every_goal_is_printed_also_from_a_check_that_was_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.json")
    monkeypatch.setattr(sys, "argv", ["check", "--report", str(path)])
    assert command.main() == 0
    text = capsys.readouterr().out
    for goal in GOALS:
        assert cells(text, goal.what) == [goal.goal, "not measured"]
    assert text.endswith("Failed: nothing.\n")


def test_docs_list_every_section_and_every_goal() -> None:
    lines = (building.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in lines if line[:1] == "|"]
    sections = [cells[1] for cells in rows if cells[0] in ("1", "2", "3", "")]
    assert sections == [BUILD.name, *(each.name for each in SECTIONS)]
    goals = [[goal.what, goal.goal] for goal in GOALS]
    first = [cells[:2] for cells in rows].index(goals[0])
    assert [cells[:2] for cells in rows[first : first + len(goals)]] == goals
