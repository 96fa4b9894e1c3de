"""Where and when the check runs."""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
import sys
from typing import Any


def machine(device: str) -> dict[str, Any]:
    """As the JSON begins. Imports no torch: there may be none."""
    asked = "import torch; print(torch.__version__, torch.version.cuda)"
    version = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout
    return {
        "device": _name_of_gpu() if device == "cuda" else "the checked device: no figures",
        "torch": version.strip(),
        "python": platform.python_version(),
        "command": " ".join(["python -m tests.gpu_check", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _name_of_gpu() -> str:
    """As the driver says, without torch."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    return "unknown"
