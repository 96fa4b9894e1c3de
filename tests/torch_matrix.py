"""Builds and tests the package with other releases of torch: ``make matrix TORCH=2.9.1``.

    python tests/torch_matrix.py 2.9.1 newest --python python3.12 --keep

Each release is installed into a fresh environment below build/matrix, as the package index has it
(for CUDA, of which nothing is needed here); there a copy of this source tree is built and its core
tests run. Prints the rows of the table in docs/torch_internals.md. An environment takes 7 GB and
is removed after its run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "newest"
NEEDED = ("setuptools>=77", "wheel", "ninja", "numpy")
FOR_TESTS = ("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors")
# What depends most on torch: its names, captures, compilers, autograd, process groups, its
# checkpoints, and that the pipeline trains as the definition does.
TESTS = (
    "tests/unit/build/test_build.py",
    "tests/unit/build/test_torch_internals.py",
    "tests/unit/capture",
    "tests/unit/dynamo",
    "tests/unit/model",
    "tests/unit/optimizer/test_any_optimizer.py",
    "tests/unit/pipeline/test_pipeline_api.py",
    "tests/unit/runtime/test_gradient_guards.py",
    "tests/unit/stages/test_compile.py",
    "tests/unit/stages/test_recompute.py",
    "tests/unit/training/test_exactness.py",
    "tests/unit/training/test_random_models.py",
    "tests/unit/training/test_random_numbers.py",
    "tests/unit/training/test_tied.py",
    "tests/distributed/test_exactness.py",
    "tests/distributed/test_comm_hooks.py",
    "tests/distributed/test_torch_checkpoints.py",
)


class Run:
    """One release of torch under one Python, in a folder of its own."""

    def __init__(self, torch: str, python: str) -> None:
        self.folder = ROOT / "build" / "matrix" / f"{torch}-{Path(python).name}"
        self.torch = torch
        self.python = python
        self.log = self.folder / "log.txt"
        self.passed = False

    def row(self) -> str:
        """Installs, builds and tests; returns the table's row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        if not (self.bin / "python").exists():
            subprocess.run([self.python, "-m", "venv", self.folder / "venv"], check=True)
        release = "torch" if self.torch == NEWEST else f"torch=={self.torch}"
        installs = self.pip("--no-cache-dir", release, *NEEDED, *FOR_TESTS)
        self.copy_sources()
        start = time.monotonic()
        builds = installs and self.pip("--no-build-isolation", "-e", ".")
        took = time.monotonic() - start
        # What the tests of processes import.
        builds = builds and self.call("setup.py", "-q", "build_ext", "--inplace", testing=True)
        counts = self.test() if builds else "-"
        built = f"in {took:.0f} s" if builds else "no" if installs else "no such torch"
        today = datetime.datetime.now(tz=datetime.timezone.utc).date()
        return (
            f"| {self.version_of('torch')} | {self.version_of()} | {today} | {built} | {counts} |"
        )

    @property
    def bin(self) -> Path:
        """The environment's commands."""
        return self.folder / "venv" / "bin"

    def call(self, *command: str, testing: bool = False) -> bool:
        """Runs a command in the copy of the sources, adding what it prints to the log."""
        source = self.folder / "source"
        source.mkdir(exist_ok=True)
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PIPEDREAM2BW_")}
        variables.pop("PYTHONPATH", None)
        variables |= {
            "PATH": os.pathsep.join((str(self.bin), os.environ["PATH"])),
            "OMP_NUM_THREADS": "1",
            "PIPEDREAM2BW_TESTING": str(int(testing)),
            "PIPEDREAM2BW_CUDA": "0",  # an nvcc may be there; it takes minutes, and tests no more
            # Object files of the same torch are found again, wherever this tree lies.
            "CCACHE_BASEDIR": str(ROOT),
            "CCACHE_NOHASHDIR": "1",
        }
        with self.log.open("a") as log:
            done = subprocess.run(
                [str(self.bin / "python"), *command],
                cwd=source,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return done.returncode == 0

    def pip(self, *what: str) -> bool:
        """Whether pip installed it."""
        options = ("-m", "pip", "--disable-pip-version-check", "install", "-q")
        return self.call(*options, "--progress-bar", "off", *what)

    def copy_sources(self) -> None:
        """Copies the files that git knows or would; what was built there before stays."""
        known = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(known, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            to = self.folder / "source" / name
            if (ROOT / name).is_file() and not self._is_same(ROOT / name, to):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to)

    @staticmethod
    def _is_same(one: Path, other: Path) -> bool:
        return other.is_file() and one.read_bytes() == other.read_bytes()

    def test(self) -> str:
        """How many tests passed, failed and were skipped; the failed ones are printed."""
        results = self.folder / "results.xml"
        results.unlink(missing_ok=True)
        options = ("-n", "2", "--timeout", "900", f"--junitxml={results}")
        self.call("-m", "pytest", *TESTS, *options)
        if not results.exists():
            return "pytest ended early"
        cases = list(ElementTree.parse(results).iter("testcase"))
        failed = [
            case
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
        skipped = [case for case in cases if case.find("skipped") is not None]
        for case in failed:
            print(f"failed: {case.get('classname')}::{case.get('name')}", file=sys.stderr)
        passed = len(cases) - len(failed) - len(skipped)
        self.passed = passed > 0 and not failed
        return f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"

    def version_of(self, package: str | None = None) -> str:
        """The installed package's version, or without one Python's."""
        asks = (
            f"import importlib.metadata as m; print(m.version({package!r}))"
            if package
            else "import platform; print(platform.python_version())"
        )
        done = subprocess.run([self.bin / "python", "-c", asks], capture_output=True, text=True)
        return done.stdout.strip() or self.torch

    def remove(self) -> None:
        """Removes the environment and the copy; the log and the results stay."""
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        shutil.rmtree(self.folder / "source", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch", nargs="+", help=f"releases, such as 2.9.1, or {NEWEST!r}")
    parser.add_argument("--python", default=sys.executable, help="of which environments are made")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    given = parser.parse_args()
    print("| torch | Python | date | built | tests |\n|---|---|---|---|---|")
    runs = [Run(release.removeprefix("torch=="), given.python) for release in given.torch]
    for run in runs:
        print(run.row(), flush=True)
        if not given.keep:
            run.remove()
    sys.exit(0 if all(run.passed for run in runs) else 1)


if __name__ == "__main__":
    main()
