"""Which tests `make check` runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import CORE, ROOMS_OF_CXX, ROOT, chosen

PACKAGE = ROOT / "pipedream2bw"
ROOMS = sorted(
    path.parent.relative_to(PACKAGE).as_posix()
    for path in [*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("*/*/__init__.py")]
)


def test_the_core_is_always_among_them() -> None:
    assert chosen([]) == sorted(CORE)
    assert set(CORE) <= set(chosen(["README.md", "pipedream2bw/capture/costs.py"]))


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_tests(room: str) -> None:
    for path in (f"pipedream2bw/{room}/some_file.py", f"pipedream2bw/{room}/deep/file.py"):
        assert f"tests/unit/{Path(room).name}" in chosen([path])


def test_every_folder_of_cxx_has_tests() -> None:
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders == set(ROOMS_OF_CXX)
    for folder, rooms in ROOMS_OF_CXX.items():
        found = chosen([f"csrc/{folder}/deep/file.cpp"])
        assert {f"tests/unit/{room}" for room in rooms} <= {*found}


def test_a_changed_test_runs_itself_unless_its_folder_does() -> None:
    own = Path(__file__).resolve().relative_to(ROOT).as_posix()
    assert own in chosen([own])
    assert "tests/unit/schedules/test_simulate.py" not in chosen(
        ["tests/unit/schedules/test_simulate.py"]
    )
    assert "tests/unit/build/test_gone.py" not in chosen(["tests/unit/build/test_gone.py"])
