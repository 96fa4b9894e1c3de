"""Installs a wheel into a fresh environment, with torch alone, and uses it: ``make wheel-test``.

    python -m tests.wheel dist/pipedream2bw-0.1.0+cputorch2.13-....whl --folder build/wheel-test

Nothing of this source tree is imported, and there is no compiler on PATH while the planner, the
simulator and the drawing run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc")

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


class Environment:
    """A virtual environment without this source tree."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        self.bin = (folder / "bin").absolute()
        self.work = (folder / "work").absolute()
        self.work.mkdir()

    def run(self, *command: str, compiler: bool = True) -> None:
        """Runs a command in the environment's own folder; raises if it fails."""
        paths = [str(self.bin), *os.environ["PATH"].split(os.pathsep)]
        if not compiler:
            paths = [each for each in paths if not _has_compiler(Path(each))]
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CC")}
        variables |= {"PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env=variables,
            check=True,
            timeout=900,
        )
        print(f"::: {' '.join(command)[:90]!r} took {time.monotonic() - start:.1f} s", flush=True)

    def install(self, *what: str) -> None:
        """Installs packages."""
        self.run("python", "-m", "pip", "--disable-pip-version-check", "install", "-q", *what)


def _has_compiler(folder: Path) -> bool:
    return any((folder / name).exists() for name in NO_COMPILER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "wheel-test")
    parser.add_argument(
        "--torch", default=f"torch=={torch.__version__}", help="what pip is asked for"
    )
    given = parser.parse_args()
    environment = Environment(given.folder)
    environment.install(*given.torch.split())
    environment.install(str(given.wheel.absolute()))
    environment.run("python", "-c", TRAINS, compiler=False)
    (environment.work / "small.py").write_text(MODEL)
    for command in COMMANDS:
        environment.run("pipedream2bw", *command.split(), compiler=False)
    environment.install("tqdm", "matplotlib")
    environment.run(
        *("python", str(ROOT / "examples" / "train_gpt.py"), "--steps", "10", "--layers", "2"),
        *("--width", "32", "--sample-bytes", "10", "--out", "out"),
    )
    environment.run(
        "pipedream2bw",
        "draw",
        "--schedule",
        "2bw",
        "--stages",
        "2",
        "--microbatches",
        "2",
        "-o",
        "run.png",
        compiler=False,
    )
    print(f"the wheel works: {given.wheel.name}")


if __name__ == "__main__":
    main()
