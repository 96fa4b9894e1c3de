"""What the operating system says of a process's memory."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(kind: str) -> int:
    """``kind``: "VmRSS" (now) or "VmHWM" (the peak so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind} in /proc/self/status")
