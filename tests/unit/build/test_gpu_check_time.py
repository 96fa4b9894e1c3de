"""What the check of a GPU does about time: limits, caps, and rows for which there is none."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipedream2bw.runtime.graphs import StageGraphs
from tests.gpu_check import first_use, graphs, kernels, oracle, sanitizer
from tests.gpu_check.device import Device
from tests.gpu_check.running import run_section
from tests.gpu_check.section import NO_TIME, Pace, Rows, Section, read_rows
from tests.gpu_check.sections import EXPECTED_BUILD, FIRST, PART, PARTS, SECTIONS, WHOLE
from tests.runs.trajectory import Trajectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def test_the_limits_and_a_build_fit_into_the_whole_and_the_parts() -> None:
    assert sum(each.seconds for each in SECTIONS) + EXPECTED_BUILD <= WHOLE
    for part in PARTS.values():
        building = EXPECTED_BUILD if part is FIRST else 0
        assert sum(each.seconds for each in part) + building <= PART


def test_the_oracle_has_a_time_of_its_own_and_comes_last_in_its_part(path: Path) -> None:
    assert PARTS[2][-1].name == "oracle"
    gpu = Device("cuda", "")
    rows = Rows(path, measures=True, seconds=300.0)
    assert oracle.seconds_of(gpu, rows) == oracle.MOST == 30
    rows = Rows(path, measures=True, seconds=20.0)
    assert oracle.seconds_of(gpu, rows) == pytest.approx(20.0 - oracle.LAST, abs=0.5)


def test_what_would_take_longer_than_there_is_time_is_not_begun(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(Rows(path, measures=True, seconds=10.0))
    begun = []
    for number in range(4):
        if pace.has_time(f"number {number}"):
            begun.append(number)
            now += 3.0
    assert begun == [0, 1]  # 4 s are left then, and 3 and what a section needs at its end are more
    assert [(row.name, row.status, row.detail) for row in read_rows(path)] == [
        (f"number {number}", "not there", NO_TIME) for number in (2, 3)
    ]


LOOPS = {
    "graphs": set(graphs.TRAININGS),
    "users_side": {"batches of pinned memory, written again, jitter 0"},
    "memory": {"2bw, float32", "2bw, messages of 16 MiB"},
}


def without_time(device: Device, rows: Rows) -> None:
    """In a section's process: asks each section as if its time were over."""
    for name, expected in LOOPS.items():
        own = rows._path.with_name(name)
        importlib.import_module(f"tests.gpu_check.{name}").run(
            device, Rows(own, measures=True, seconds=0.0)
        )
        found = read_rows(own)
        absent = {row.name for row in found if row.detail == NO_TIME}
        rows.check(name, absent >= expected, f"{found}")
        rows.check(f"{name}: only those", {row.status for row in found} == {"not there"})


def test_sections_say_for_what_no_time_was_left() -> None:
    section = Section("made", 60.0, "", f"{__name__}:without_time")
    outcome = run_section(section, "checked", 60.0)
    assert outcome.status == "pass", (outcome.rows, outcome.output)


def test_passes_for_which_no_time_was_left_are_not_said_to_be_right(path: Path) -> None:
    kernels.run(Device("cpu", ""), Rows(path, measures=True, seconds=0.0))
    rows = read_rows(path)
    assert {row.status for row in rows} == {"not there"}
    assert {"float32: adamw", "split master: adam", "every misalignment"} < {r.name for r in rows}


def test_a_sanitizer_that_was_cut_off_has_found_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    monkeypatch.setattr(Device, "has_kernels", True)
    sanitizer.run(Device("cuda", ""), Rows(path, measures=True, seconds=1.0))
    (row,) = read_rows(path)
    assert (row.status, row.detail.startswith(NO_TIME)) == ("not there", True)


@pytest.mark.parametrize(
    ("bits", "status", "name"),
    [
        ([1.0, 1.0, 1.0], "pass", "the bits of"),
        ([1.0, 1.0, 1.0001], "FAIL", "the bits of"),
        ([1.0, 1.0001, 1.0002], "pass", "within 0.001 of"),
        ([1.0, 1.0001, 1.1], "FAIL", "within 0.001 of"),
    ],
)
def test_attention_is_compared_as_closely_as_torch_repeats_it(
    bits: list[float], status: str, name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "train", trained(bits))
    rows = Rows(path, measures=True)
    graphs.judge_attention(Device("cpu", ""), rows, "attention", graphs.Training())
    found = {row.name: row.status for row in read_rows(path)}
    assert found[f"attention: {name} a training without graphs"] == status
    assert ("attention: two trainings without graphs" in found) == ("within" in name)


def trained(bits: list[float]) -> Any:
    given: Iterator[float] = iter(bits)
    one = StageGraphs(forwards=1, backwards=1, num_graphs=2, bytes=0, others={})
    used = {0: one, 1: one}
    return lambda *_, **__: (Trajectory([], {"w": torch.tensor([next(given)])}), used, 0)


def test_attention_that_torch_refuses_is_not_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(graphs, "train", refuse)
    rows = Rows(path, measures=True)
    graphs.judge_attention(Device("cpu", ""), rows, "attention", graphs.Training())
    (row,) = read_rows(path)
    assert row.status == "not there"
    assert re.search("without graphs RuntimeError: No available kernel", row.detail)


def test_every_first_use_meets_a_sleeping_kernel(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def launch(*_: Any) -> float:
        did.append("launch")
        return math.nan

    monkeypatch.setattr(Device, "sleep", lambda device, seconds: did.append("sleep"))
    monkeypatch.setattr(Device, "synchronize", lambda device: did.append("synchronize"))
    monkeypatch.setattr(first_use, "launch", launch)
    first_use.run(Device("cpu", ""), Rows(path, measures=True))
    assert did == ["sleep", "synchronize", *["sleep", "launch", "launch", "synchronize"] * 3]
