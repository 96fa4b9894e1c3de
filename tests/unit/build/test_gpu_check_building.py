"""The check of a GPU builds what can be built, or takes the build that is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.gpu_check import building
from tests.gpu_check.section import Row, Rows, read_rows

WITH, WITHOUT = "PIPEDREAM2BW_CUDA=1", "PIPEDREAM2BW_CUDA=0"


class Machine:
    """Stands for a machine with a GPU: what builds there, and what can be imported then."""

    def __init__(self, *, nvcc: bool = True, gpu: bool = True, loads: str = "kernels") -> None:
        self.nvcc, self.gpu, self.loads = nvcc, gpu, loads
        self.built: list[str] = []

    def set_up(self, environment: dict[str, str], seconds: float) -> tuple[int, str]:
        setting = environment["PIPEDREAM2BW_CUDA"]
        self.built.append(setting)
        if setting == "1" and not self.nvcc:
            return 1, "compiling\nthere is no nvcc"
        self.loads = {"1": self.loads, "0": "no kernels"}[setting]
        return 0, "Used 40 registers\n0 bytes spill stores"

    def python(self, statements: str) -> tuple[str, bool]:
        if "capability" in statements:
            return ("9.0", True) if self.gpu else ("AssertionError: no GPU\nand more", False)
        if not self.loads:
            return "ImportError: undefined symbol", False
        return f"built with torch 2.11.0 and {self.loads}", True


def build_on(
    machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch, *, builds: bool = True
) -> tuple[bool, list[Row]]:
    monkeypatch.setattr(building, "_set_up", machine.set_up)
    monkeypatch.setattr(building, "_python", machine.python)
    rows = Rows(path, measures=True)
    done = building.run("cuda", rows, 240.0, left=300.0, builds=builds)
    return done, read_rows(path)


def statuses(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.name.split(" TORCH")[0], row.status) for row in rows]


def test_kernels_are_built_and_their_registers_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    done, rows = build_on(machine, tmp_path / "rows", monkeypatch)
    assert (done, machine.built) == (True, ["1"])
    assert statuses(rows) == [
        (WITH, "pass"),
        ("registers", "noted"),
        ("no register is spilled", "pass"),
        ("the build can be imported", "pass"),
    ]


@pytest.mark.parametrize("why", ["there is no nvcc", "undefined symbol"])
def test_where_kernels_cannot_be_built_the_package_is_built_without(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(nvcc=False) if why == "there is no nvcc" else Machine(loads="")
    done, rows = build_on(machine, tmp_path / "rows", monkeypatch)
    assert (done, machine.built) == (True, ["1", "0"])
    (failed,) = (row for row in rows if row.status == "FAIL")
    assert why in failed.detail
    assert [row.name for row in rows if row.status == "not there"] == ["kernels", "kernels"]
    assert statuses(rows)[-2:] == [("without kernels", "pass"), ("kernels", "not there")]


def test_without_a_gpu_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(gpu=False)
    done, (row,) = build_on(machine, tmp_path / "rows", monkeypatch)
    assert (done, machine.built) == (False, [])
    assert (row.status, row.detail) == ("FAIL", "AssertionError: no GPU")


def test_a_build_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine()
    done, (row,) = build_on(machine, tmp_path / "rows", monkeypatch, builds=False)
    assert (done, machine.built) == (True, [])
    assert (row.status, row.detail) == ("pass", "built with torch 2.11.0 and kernels")


def test_a_build_that_is_there_but_not_for_this_torch_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(loads="")
    machine.set_up({"PIPEDREAM2BW_CUDA": "1"}, 1.0)

    def set_up(environment: dict[str, str], seconds: float) -> tuple[int, str]:
        machine.loads = "kernels"
        return Machine.set_up(machine, environment, seconds)

    monkeypatch.setattr(building, "_python", machine.python)
    monkeypatch.setattr(building, "_set_up", set_up)
    rows = Rows(tmp_path / "rows", measures=True)
    assert building.run("cuda", rows, 240.0, left=300.0, builds=False)
    found = read_rows(tmp_path / "rows")
    assert statuses(found)[:2] == [("the build that is there", "FAIL"), (WITH, "pass")]
    assert statuses(found)[-1] == ("the build can be imported", "pass")


def test_the_package_that_is_here_says_with_what_it_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = Rows(tmp_path / "rows", measures=False)
    assert building.run("checked", rows, 1.0, left=1.0, builds=False)
    (row,) = read_rows(tmp_path / "rows")
    assert row.status == "pass"
    assert row.detail.startswith("built with torch ")
    monkeypatch.setitem(building._OTHERS, "checked", "import tests.device.none")
    monkeypatch.setattr(building, "_set_up", lambda *_: (1, "not built in a test"))
    assert not building.run("checked", rows, 1.0, left=1.0, builds=False)
    first, second = read_rows(tmp_path / "rows")[1:]
    assert first.detail.startswith("ModuleNotFoundError: No module named 'tests.device.none'")
    assert (second.name, second.status) == (WITHOUT, "FAIL")


def test_a_build_ends_with_its_time_and_tells_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "setup.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(building, "ROOT", tmp_path)
    start = time.monotonic()
    code, log = building._set_up({}, 1.5)
    assert code == -9
    assert time.monotonic() - start < 30
    compiler = int(log)
    for _ in range(100):
        if not _runs(compiler):
            break
        time.sleep(0.05)
    assert not _runs(compiler)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
