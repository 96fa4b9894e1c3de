"""The bar of what makes a person wait: on a terminal, after a while, and gone at the end."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from pipedream2bw.progress import progress

WAITS = """
import time
from pipedream2bw import progress as module

progress, module.SHOWN_AFTER = module.progress, 0.5
with progress("export of Model") as begin:
    begin("quick")
with progress("capture of Model") as begin:
    begin("export")
    time.sleep(1.2)
with progress("profile", 3) as begin:
    begin("microbatches of 2 rows")
    begin("microbatches of 4 rows")
    time.sleep(1.2)
"""


def said(**variables: str) -> str:
    """What a program writes on a terminal that does one thing quickly and two slowly."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], env=os.environ | variables, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
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
    shown = said()
    assert "quick" not in shown
    assert "capture of Model [00:0" in shown
    assert "export" in shown
    assert "profile" in shown
    assert "1/3" in shown
    assert "microbatches of 4 rows" in shown
    assert shown.endswith("\r")  # the line is empty again


@pytest.mark.parametrize(
    ("terminal", "rank", "waits"), [(True, "0", True), (False, "0", False), (True, "1", False)]
)
def test_a_bar_waits_on_the_first_ranks_terminal_alone(
    terminal: bool, rank: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with progress("capture"):
        assert waits == ("progress bar" in {thread.name for thread in threading.enumerate()})
    assert sys.stderr.getvalue() == ""


def test_without_tqdm_nothing_is_shown(tmp_path: Path) -> None:
    (tmp_path / "tqdm.py").write_text("raise ImportError('not installed')", encoding="utf-8")
    assert said(PYTHONPATH=str(tmp_path)) == ""
