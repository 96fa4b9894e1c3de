"""Installs a wheel into a fresh environment, with torch alone, and uses it: ``make wheel-test``.

    python -m tests.wheel dist/pipedream2bw-....whl --sdist dist/pipedream2bw-....tar.gz

Nothing of this source tree is imported but the example, and there is no compiler on PATH while the
planner, the simulator and the drawing run. Then builds the source distribution, in the wheel's
place.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc")

TYPES = "pipedream2bw/_C.pyi"  # of the extension, generated, for type checkers

TRAINS = """
import torch, pipedream2bw as pd2
assert "site-packages" in pd2.__file__, pd2.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
x = torch.randn(8, 8)
with pd2.PipelineModule(
    model, torch.nn.functional.mse_loss, num_stages=2, num_microbatches=2, example_args=(x,)
) as pipe:
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    losses = []
    for _ in range(20):
        losses.append(pipe.train_step(x, target=x))
        opt.step()
    losses = [float(loss) for loss in losses]
assert losses[-1] < losses[0], losses
print("trained:", losses[0], "to", losses[-1])
"""

ANOTHER_TORCH = "2.99.0"
REFUSED = f"""
import torch
torch.__version__ = "{ANOTHER_TORCH}"
try:
    import pipedream2bw
except ImportError as error:
    said = str(error)
    assert "torch {ANOTHER_TORCH}" in said and "torch2.99cxx11abi" in said, said
    print("refused, as it should be:", said)
else:
    raise SystemExit("torch {ANOTHER_TORCH} was not refused")
"""

MODEL = """
import torch

def build():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x = torch.zeros(1, 64)
    loss = torch.nn.functional.mse_loss
    return {"model": model, "loss_fn": loss, "example_args": (x,), "target": x}
"""

PLANS = "plan --model small:build --dry v100 --devices 4 --memory 1GiB --batch 32 --schedules 2bw"
COMMANDS = (
    "draw --schedule 2bw --stages 4 --microbatches 8",
    "schedules --json",
    f"{PLANS} -o plan.json",
    "show plan.json",
    "doctor",
)
WITH_MATPLOTLIB = ("draw --schedule 2bw --stages 2 --microbatches 2 -o run.png",)


class Environment:
    """A virtual environment without this source tree."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        self.bin = (folder / "bin").absolute()
        self.work = (folder / "work").absolute()
        self.work.mkdir()

    def run(self, *command: str, compiler: bool = True) -> float:
        """Runs a command in the environment's own folder; raises if it fails. Returns seconds."""
        start = time.monotonic()
        subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env=self._variables(compiler),
            check=True,
            timeout=1800,
        )
        took = time.monotonic() - start
        print(f"::: {' '.join(command)[:90]!r} took {took:.1f} s", flush=True)
        return took

    def run_until(self, pattern: str, *command: str) -> float:
        """Runs a command until what it prints matches; returns the seconds until then."""
        start = time.monotonic()
        with subprocess.Popen(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env=self._variables(compiler=False),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if re.search(pattern, line):
                    took = time.monotonic() - start
                    process.terminate()
                    process.stdout.read()
                    return took
        raise SystemExit("".join([*printed, f"{command}: never printed {pattern!r}"]))

    def _variables(self, compiler: bool) -> dict[str, str]:
        paths = [str(self.bin), *os.environ["PATH"].split(os.pathsep)]
        if not compiler:
            paths = [each for each in paths if not _has_compiler(Path(each))]
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CC")}
        variables |= {"PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        return variables

    def install(self, *what: str) -> float:
        """Installs packages; returns the seconds that it took."""
        pip = ("python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
        return self.run(*pip, *what)


def _has_compiler(folder: Path) -> bool:
    return any((folder / name).exists() for name in NO_COMPILER)


def processor_seconds() -> float:
    """What the processes that have ended so far used of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def use_wheel(environment: Environment, wheel: Path) -> None:
    """Installs the wheel and uses all that it brings; prints how long a first training took."""
    if TYPES not in zipfile.ZipFile(wheel).namelist():
        raise SystemExit(f"{wheel.name} lacks {TYPES}")
    worked = processor_seconds()
    installed = environment.install(str(wheel.absolute()))
    worked = processor_seconds() - worked
    environment.run("python", "-c", REFUSED, compiler=False)
    environment.run("python", "-c", TRAINS, compiler=False)
    (environment.work / "small.py").write_text(MODEL)
    for command in COMMANDS:
        environment.run("pipedream2bw", *command.split(), compiler=False)
    environment.install("tqdm", "matplotlib")
    for command in WITH_MATPLOTLIB:
        environment.run("pipedream2bw", *command.split(), compiler=False)
    example = str(ROOT / "examples" / "train_gpt.py")
    worked -= processor_seconds()
    started = environment.run_until(
        r"loss \d", "torchrun", "--standalone", "--nproc-per-node", "2", example
    )
    worked += processor_seconds()
    print(
        f"::: the wheel was installed in {installed:.1f} s, and torchrun train_gpt.py printed its "
        f"first loss {started:.1f} s after its start: {worked:.1f} processor seconds in all",
        flush=True,
    )
    environment.run(
        *("python", example, "--steps", "10", "--layers", "2", "--width", "32"),
        *("--sample-tokens", "10", "--out", "out"),
        compiler=False,
    )


def use_sdist(environment: Environment, sdist: Path) -> None:
    """Builds the source distribution in the environment, in the wheel's place, and trains."""
    if missing := not_in(sdist):
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}")
    environment.run("python", "-m", "pip", "uninstall", "-q", "-y", "pipedream2bw")
    environment.install("setuptools>=77", "wheel", "ninja")
    environment.install("--no-build-isolation", str(sdist.absolute()))
    environment.run("python", "-c", TRAINS, compiler=False)
    environment.run("pipedream2bw", "doctor", compiler=False)


def not_in(sdist: Path) -> list[str]:
    """What the source distribution lacks of the types and of all files but hidden ones."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True
    )
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {name for name in listed.stdout.splitlines() if not name.startswith(".")}
    return sorted({*files, TYPES} - packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--sdist", type=Path, help="the source distribution, to build as well")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "wheel-test")
    parser.add_argument(
        "--torch", default=f"torch=={torch.__version__}", help="what pip is asked for"
    )
    given = parser.parse_args()
    environment = Environment(given.folder)
    environment.install(*given.torch.split())
    use_wheel(environment, given.wheel)
    print(f"the wheel works: {given.wheel.name}", flush=True)
    if given.sdist is not None:
        use_sdist(environment, given.sdist)
        print(f"the source distribution works: {given.sdist.name}")


if __name__ == "__main__":
    main()
