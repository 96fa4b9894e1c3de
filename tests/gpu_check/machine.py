"""Where and when the check runs."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from typing import Any

ASKED = """
import torch
print(torch.__version__, torch.version.cuda, flush=True)
print(*torch.cuda.nccl.version(), sep=".")
"""


def machine(device: str) -> dict[str, Any]:
    """As the JSON begins. Imports no torch: there may be none."""
    torch, nccl = _of_torch()
    return {
        "device": _name_of_gpu() if device == "cuda" else "the checked device: no figures",
        "torch": torch,
        "nccl": nccl if device == "cuda" else "",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "command": " ".join(["python -m tests.gpu_check", *_options(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _options(arguments: list[str]) -> list[str]:
    """Without the path of the results, which is this machine's."""
    at = arguments.index("--json") if "--json" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _of_torch() -> tuple[str, str]:
    """Its version with CUDA's, and NCCL's."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [sys.executable, "-c", ASKED]
        said = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
        first, *more = said.splitlines() or ["unknown"]
        return first, (more or [""])[0]
    return "unknown", ""


def _name_of_gpu() -> str:
    """As the driver says, without torch."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    return "unknown"
