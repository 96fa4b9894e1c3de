"""Builds the extension in place, for the GPU that is here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from .section import Rows

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 40
"""Lines of a failed build."""


def run(device_type: str, rows: Rows, seconds: float) -> bool:
    """Tells whether it was built. Runs without torch, which another process asks."""
    deadline = time.monotonic() + seconds
    if device_type == "cuda":
        capability = _of_torch("print(*torch.cuda.get_device_capability(), sep='.')")
        if not re.fullmatch(r"\d+\.\d+", capability):
            rows.check("torch sees a GPU", False, capability)
            return False
        environment = {
            "PIPEDREAM2BW_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": capability,
            "NVCC_APPEND_FLAGS": "-Xptxas=-v",  # nvcc's own variable
        }
        builds = [environment]
    else:
        builds = [{"PIPEDREAM2BW_CUDA": "0"}, {"PIPEDREAM2BW_TESTING": "1"}]
    for environment in builds:
        start = time.monotonic()
        code, log = _build(environment, deadline - start)
        what = " ".join(f"{name}={value}" for name, value in environment.items())
        if code != 0:
            rows.check(what, False, "\n".join([f"exit code {code}", *log.splitlines()[-SHOWN:]]))
            return False
        rows.check(what, True, f"{time.monotonic() - start:.0f} s")
        if device_type == "cuda":
            _note_registers(log, rows)
    return True


def _build(environment: dict[str, str], seconds: float) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        env=os.environ | {"MAX_JOBS": str(len(os.sched_getaffinity(0)))} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log, _ = process.communicate()
    return process.returncode, log


def _note_registers(log: str, rows: Rows) -> None:
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", log))
    if not registers:
        rows.note("registers", "every kernel was compiled before")
        return
    rows.note("registers", f"{len(registers)} kernels, {min(registers)} to {max(registers)}")
    rows.check("no register is spilled", spilled == 0, f"{spilled} bytes")


def _of_torch(statement: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", f"import torch; {statement}"], capture_output=True, text=True
    )
    return (ran.stdout.strip() or ran.stderr.strip()).splitlines()[-1]
