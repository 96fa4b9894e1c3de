"""Builds the extension in place, for the GPU that is here, or takes the build that is there."""

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
ASKING = 90.0
"""Seconds that an import of torch may take, for the first time on a machine."""
_LOADED = """
import torch
import pipedream2bw._C
from pipedream2bw import _build_info as built
print("built with torch", built.TORCH_VERSION, "and", built.WITH_CUDA and "kernels" or "no kernels")
"""
_OTHERS = {"cuda": "torch.cuda.get_device_name()", "checked": "import tests.device._checked"}
"""What else must be there."""


def run(device_type: str, rows: Rows, seconds: float, *, left: float, builds: bool = True) -> bool:
    """Tells whether the package can be imported. Runs without torch, which other processes ask.

    Without nvcc, and where the kernels cannot be built, it is built without: much can be asked all
    the same.

    Args:
        seconds: for one build.
        left: for all of them.
        builds: False: a build that is there and can be imported is taken as it is.
    """
    deadline = time.monotonic() + left
    if not builds and _is_there(device_type, rows, "the build that is there"):
        return True

    def build(environment: dict[str, str]) -> bool:
        return _build(environment, min(seconds, deadline - time.monotonic()), rows)

    if device_type == "checked":
        return build({"PIPEDREAM2BW_CUDA": "0"}) and build({"PIPEDREAM2BW_TESTING": "1"})
    architecture = _of_torch("print(*torch.cuda.get_device_capability(), sep='.')")
    if not re.fullmatch(r"\d+\.\d+", architecture):
        rows.check("torch sees a GPU", False, architecture)
        return False
    with_kernels = {
        "PIPEDREAM2BW_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": architecture,
        "NVCC_APPEND_FLAGS": "-Xptxas=-v",  # nvcc's own variable
    }
    if build(with_kernels) and _is_there(device_type, rows, "the build can be imported"):
        return True
    rows.absent("kernels", "they cannot be built here: what only torch's own computes is asked")
    return build({"PIPEDREAM2BW_CUDA": "0"}) and _is_there(device_type, rows, "without kernels")


def _is_there(device_type: str, rows: Rows, name: str) -> bool:
    """Imports the extension in another process; says with what it was built."""
    said, is_well = _python(_LOADED + _OTHERS[device_type])
    rows.check(name, is_well, said)
    if is_well and device_type == "cuda" and "no kernels" in said:
        rows.absent("kernels", "it was built without")
    return is_well


def _build(environment: dict[str, str], seconds: float, rows: Rows) -> bool:
    start = time.monotonic()
    code, log = _set_up(environment, seconds)
    what = " ".join(f"{name}={value}" for name, value in environment.items())
    taken = f"{time.monotonic() - start:.0f} s"
    if code != 0:
        why = f"exit code {code} after {taken}"
        rows.check(what, False, "\n".join([why, *log.splitlines()[-SHOWN:]]))
        return False
    rows.check(what, True, taken)
    if environment.get("PIPEDREAM2BW_CUDA") == "1":
        _note_registers(log, rows)
    return True


def _set_up(environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """What was compiled until the time is over is kept for the next build."""
    process = subprocess.Popen(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        env=os.environ | {"MAX_JOBS": str(len(os.sched_getaffinity(0)))} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=max(seconds, 1.0))
    except BaseException as error:  # an interrupt is none of the compilers': they have a session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log, _ = process.communicate(timeout=10.0)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
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
    said, is_well = _python(f"import torch; {statement}")
    return said.splitlines()[-1 if is_well else 0]


def _python(statements: str) -> tuple[str, bool]:
    """What a new process says, and whether it ended well."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", statements],
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASKING,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}", False
    said = ran.stdout.strip() or ran.stderr.strip() or f"exit code {ran.returncode}"
    if ran.returncode != 0:  # the exception's line first
        lines = (ran.stderr.strip() or said).splitlines()
        said = "\n".join([lines[-1], *lines[:-1]])
    return said, ran.returncode == 0
