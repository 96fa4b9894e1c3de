"""Holds docs/spine.txt against the lines that a training passes: ``make spine``.

    python -m tests.spine [--lines FILE]

The README's first example runs in threads under coverage (Python by its trace function, C++ by
gcov, in a build of its own under build/spine), then in two processes. Of the lines that run after
the import in threads the files of docs/spine.txt have at least 90 %. They are at most 60, of at
most 12,000 lines. --lines shows a file with a mark at each line that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPINE = ROOT / "docs" / "spine.txt"
BUILD = ROOT / "build" / "spine"
MAX_FILES, MAX_LINES, MIN_SHARE = 60, 12_000, 0.9

Lines = dict[str, set[int]]
"""Lines that ran, by a file's path in the repository."""


def build() -> None:
    """Builds the package into ``BUILD``, its extension for gcov."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", str(BUILD)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PIPEDREAM2BW_COVERAGE": "1", "PIPEDREAM2BW_CUDA": "0"},
        stdout=subprocess.DEVNULL,
    )


def objects() -> Path:
    (folder,) = ROOT.joinpath("build").glob("temp-*-coverage")
    return folder


def run(options: Sequence[str], processes: int) -> tuple[Lines, dict[str, dict[int, int]]]:
    """Runs training.py; gives the Python lines that ran, and how often those of C++ have."""
    for counts in objects().rglob("*.gcda"):
        counts.unlink()
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, *(launch if processes > 1 else ())),
                *("-m", "tests.spine.training", f"{folder}/lines", *options),
            ],
            check=True,
            cwd=BUILD,  # whose package is imported, not the repository's
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        python: Lines = defaultdict(set)
        for path in Path(folder).iterdir():
            for file, lines in json.loads(path.read_text(encoding="utf-8")).items():
                python[f"pipedream2bw/{file}"].update(lines)
    return python, cpp_counts()


def cpp_counts() -> dict[str, dict[int, int]]:
    """How often each line of csrc has run, as gcov says."""
    notes = [str(path) for path in objects().rglob("*.gcda")]
    printed = subprocess.run(
        ["gcov", "--json-format", "--stdout", *notes],
        check=True,
        cwd=objects(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for unit in map(json.loads, printed.splitlines()):
        for file in unit["files"]:
            path = (Path(unit["current_working_directory"]) / file["file"]).resolve()
            if path.is_relative_to(ROOT / "csrc"):
                for line in file["lines"]:
                    counts[str(path.relative_to(ROOT))][line["line_number"]] += line["count"]
    return counts


def passed_by_a_training(processes: int) -> Lines:
    """The lines that run after the import."""
    _, imported = run(["--import-only"], 1)
    python, counts = run([], processes)
    lines = defaultdict(set, python)
    for file, of_file in counts.items():
        at_import = imported.get(file, {})
        ran = {line for line, n in of_file.items() if n > processes * at_import.get(line, 0)}
        if ran:
            lines[file] = ran
    return lines


def num_lines(file: str) -> int:
    return len(ROOT.joinpath(file).read_text(encoding="utf-8").splitlines())


def share_of(spine: Sequence[str], lines: Lines) -> float:
    return sum(len(lines[file]) for file in spine) / sum(map(len, lines.values()))


def print_table(spine: Sequence[str], lines: Lines) -> None:
    """Files by the lines that ran: those that are not the spine's are marked."""
    for file in sorted({*lines, *spine}, key=lambda file: -len(lines[file])):
        mark = " " if file in spine else "-"
        print(f"{mark} {len(lines[file]):5} of {num_lines(file):5}  {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", help="a file to show, with a mark at each line that ran")
    options = parser.parse_args()
    build()
    threads = passed_by_a_training(1)
    if options.lines:
        text = ROOT.joinpath(options.lines).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(text, 1):
            print("*" if number in threads[options.lines] else " ", line)
        return 0
    processes = passed_by_a_training(2)
    spine = SPINE.read_text(encoding="utf-8").split()
    both = defaultdict(set, {f: threads[f] | processes[f] for f in {*threads, *processes}})
    print_table(spine, both)
    size = sum(map(num_lines, spine))
    share = share_of(spine, threads)
    print(f"docs/spine.txt: {len(spine)} files, {size} lines")
    print(f"of {sum(map(len, threads.values()))} lines that ran in threads: {share:.1%}")
    both_share = share_of(spine, both)
    print(f"of {sum(map(len, both.values()))} there or in processes: {both_share:.1%}")
    is_small = len(spine) <= MAX_FILES and size <= MAX_LINES
    if not is_small or share < MIN_SHARE or len(set(spine)) < len(spine):
        print(f"wanted: {MAX_FILES} files, {MAX_LINES} lines, {MIN_SHARE:.0%} of those in threads")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
