"""The bar of what makes a person wait: on a terminal, after a while, and gone at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

WAITS = """
import time
from pipedream2bw import progress as module

progress, module.SHOWN_AFTER = module.progress, 0.5
with progress("capture of Model") as begin:
    begin("export")
    time.sleep({seconds})
with progress("profile", 3) as begin:
    begin("microbatches of 2 rows")
    begin("microbatches of 4 rows")
    time.sleep({seconds})
"""


LONG = 1.2  # seconds


def said(seconds: float, *, terminal: bool = True, **variables: str) -> str:
    """What a program writes on stderr that takes so long in each of two things."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(seconds=seconds)],
        env=os.environ | variables,
        stderr=theirs if terminal else subprocess.PIPE,
    )
    os.close(theirs)
    written = b""
    if not terminal:
        written = process.communicate(timeout=60)[1]
    while terminal:
        try:
            more = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        written += more
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return written.decode()


def test_a_terminal_shows_what_takes_long_and_the_step_it_is_at() -> None:
    pytest.importorskip("tqdm")
    shown = said(LONG)
    assert "capture of Model [00:0" in shown
    assert "export" in shown
    assert "profile" in shown
    assert "1/3" in shown
    assert "microbatches of 4 rows" in shown
    assert shown.endswith("\r")  # the line is empty again


@pytest.mark.parametrize(
    ("seconds", "terminal", "variables"),
    [(0.1, True, {}), (LONG, False, {}), (LONG, True, {"RANK": "1"})],
    ids=["what is quick", "no terminal", "another rank than the first"],
)
def test_nothing_is_shown_elsewhere(
    seconds: float, terminal: bool, variables: dict[str, str]
) -> None:
    assert said(seconds, terminal=terminal, **variables) == ""


def test_without_tqdm_nothing_is_shown(tmp_path: Path) -> None:
    (tmp_path / "tqdm.py").write_text("raise ImportError('not installed')", encoding="utf-8")
    assert said(LONG, PYTHONPATH=str(tmp_path)) == ""
