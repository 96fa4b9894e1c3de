"""compute-sanitizer over one size of every optimizer pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .building import ROOT
from .device import Device
from .section import NO_TIME, Rows

USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")
LAST = 3.0  # seconds before the section's end


def run(device: Device, rows: Rows) -> None:
    found = shutil.which("compute-sanitizer") or (str(USUAL) if USUAL.is_file() else None)
    if not device.is_gpu or not device.has_kernels or found is None:
        why = "there is none" if device.is_gpu and device.has_kernels else "there are no kernels"
        rows.absent("compute-sanitizer", why)
        return
    command = [found, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu_check.kernels"]
    seconds = max(rows.seconds_left - LAST, 1.0)
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        rows.absent("under compute-sanitizer", f"{NO_TIME}: it was not done in {seconds:.0f} s")
        return
    shown = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
    rows.check("under compute-sanitizer", done.returncode == 0, shown)
