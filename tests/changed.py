"""Prints the tests of what has changed: the arguments of pytest that `make check` runs.

    python tests/changed.py [COMMIT]     since COMMIT; without one, what is not committed

A room's tests are in the folder of its name, so the files that changed say which tests to run. With
every change, and without one, the core is run: pipelines of each schedule train as the unsplit
model does, in threads and in processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "tests/unit/training/test_exactness.py",
    "tests/unit/pipeline/test_pipeline_api.py",
    "tests/unit/schedules",
    "tests/distributed/test_exactness.py::test_stages_in_processes_equal_the_definition[2]",
    "tests/distributed/test_exactness.py::test_replicas_in_processes_equal_the_definition[2-1]",
)
ROOMS_OF_CXX = {
    "core": ("schedules", "planning"),
    "planner": ("schedules", "planning"),
    "engine": ("runtime", "optimizer"),
    "kernels": ("optimizer",),
    "transport": ("runtime",),
    "bindings": ("runtime", "optimizer", "schedules"),
}
"""By the first folder below csrc: the folders of tests/unit that call it most."""


def tests_of(path: PurePosixPath) -> Iterator[str]:
    """The tests of one changed file, of which some may not exist."""
    match path.parts:
        case ("tests", "unit" | "distributed", *_, name) if name.startswith("test_"):
            yield str(path)
        case ("pipedream2bw", "planner" | "extras" as house, room, *_):
            yield from (f"tests/unit/{house}", f"tests/unit/{room}")
        case ("pipedream2bw", room, _, *_):
            yield f"tests/unit/{room}"
        case ("tests", "delays", _):
            yield "tests/unit/runtime/test_delays.py"
        case ("csrc", folder, *_):
            yield from (f"tests/unit/{room}" for room in ROOMS_OF_CXX.get(folder, ()))


def chosen(changed: Iterable[str]) -> list[str]:
    """The core's tests and those of the changed files, each once."""
    found = {test for path in changed for test in tests_of(PurePosixPath(path))}
    existing = {test for test in found.union(CORE) if (ROOT / test.partition("::")[0]).exists()}

    def runs_anyway(test: str) -> bool:
        file, inside, _ = test.partition("::")
        above = [*PurePosixPath(file).parents, *([file] if inside else [])]
        return any(str(folder) in existing for folder in above)

    return sorted(test for test in existing if not runs_anyway(test))


def changed_files(since: str) -> list[str]:
    """The files that differ from the commit, new ones too."""
    git = ["git", "-C", str(ROOT)]
    commands = (
        [*git, "diff", "--name-only", since],
        [*git, "ls-files", "--others", "--exclude-standard"],
    )
    return [
        line
        for command in commands
        for line in subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    ]


if __name__ == "__main__":
    print(*chosen(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD")))
