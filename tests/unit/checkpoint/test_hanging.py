"""A file system that hangs keeps no program waiting for ever: whoever waits for it says so."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint import writing
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import MANIFEST, Folder
from pipedream2bw.checkpoint.other_formats import import_weights
from pipedream2bw.checkpoint.snapshot import HostMemory
from pipedream2bw.checkpoint.waiting import FolderCall
from tests.runs.saved import saved
from tests.unit.checkpoint.conftest import Hangs, Run, X


@pytest.fixture
def run(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that waits for a file system for 0.5 s, and for a save for 1 s."""
    run = start(every=1000)
    monkeypatch.setattr(run.pipe.session.control, "timeout", 1.0)
    return run


def test_a_save_is_waited_for_as_long_as_it_says_and_may_yet_become_whole(
    run: Run, hang: Hangs, tmp_path: Path
) -> None:
    answers = hang("make")
    run.train(1)
    save = pd2.save(tmp_path / "own", run.pipe, run.opt)
    for timeout, seconds in ((None, 1), (0.1, 0.1), (1, 1)):
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=f"{tmp_path}/own: checkpoint 1.* {seconds} s"):
            save.wait() if timeout is None else save.wait(timeout)
        assert seconds <= time.monotonic() - begun < seconds + 5
    answers.set()
    save.wait(30)
    assert steps_in(Folder(tmp_path / "own")) == [1]


@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_wait_cannot_be_is_refused(run: Run, is_open: bool, tmp_path: Path) -> None:
    run.train(1)
    save = pd2.save(tmp_path / "own", run.pipe, run.opt)
    save.wait(30)
    if not is_open:
        run.pipe.close()
    for timeout in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"timeout: {timeout}, it must be > 0 and finite"):
            save.wait(timeout)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match=r"timeout: .* given, it must be a number"):
            save.wait(wrong)  # type: ignore[arg-type]
    save.wait(30)
    assert run.pipe.session.ending.is_open == is_open


@pytest.fixture
def without_a_reader(run: Run, tmp_path: Path) -> Iterator[Path]:
    """Two checkpoints, of which the newer one's manifest is a pipe: reading it hangs."""
    run.train(1)
    pd2.save(tmp_path / "run", run.pipe, run.opt).wait(30)
    run.train(1)
    pd2.save(tmp_path / "run", run.pipe, run.opt).wait(30)
    manifest = saved(tmp_path / "run", 2) / MANIFEST
    kept = manifest.rename(tmp_path / "kept")
    os.mkfifo(manifest)
    yield kept
    with contextlib.suppress(OSError):
        os.close(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize(
    "call",
    ["resume", "load"],
)
def test_a_checkpoint_that_cannot_be_read_as_the_file_system_hangs_is_named_and_stays(
    call: str,
    run: Run,
    without_a_reader: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        TimeoutError, match=r"/run: reading step-00000002-.* has not answered for 0.5 s"
    ):
        run.ckpt.resume() if call == "resume" else pd2.load(tmp_path / "run", run.pipe, run.opt)
    manifest = saved(tmp_path / "run", 2) / MANIFEST
    os.close(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
    without_a_reader.rename(manifest)
    monkeypatch.setattr(run.pipe.session.control, "timeout", 60.0)
    assert run.ckpt.resume() == 2


@pytest.mark.parametrize(
    ("method", "action"),
    [
        ("names", "looking for checkpoints"),
        ("size", "reading step-00000001-.*"),
    ],
)
def test_going_on_ends_where_the_file_system_hangs(
    method: str, action: str, run: Run, hang: Hangs, tmp_path: Path
) -> None:
    run.train(1)
    pd2.save(tmp_path / "run", run.pipe, run.opt).wait(30)
    hang(method)
    with pytest.raises(TimeoutError, match=f"/run: {action}: .* not answered for 0.5 s"):
        run.ckpt.resume()
    assert run.pipe.session.ending.is_open


@pytest.mark.parametrize("is_imported", [False, True])
def test_loading_tensors_ends_where_the_file_system_hangs(
    is_imported: bool, run: Run, hang: Hangs, tmp_path: Path
) -> None:
    if is_imported:
        torch.save(run.pipe.state_dict(), tmp_path / "weights.pt")
        import_weights(tmp_path / "weights.pt", tmp_path / "own")
    else:
        pd2.save(tmp_path / "own", run.pipe, run.opt).wait(30)
    hang("open")
    with pytest.raises(TimeoutError, match=r"/own: reading step-00000000-.* for 0.5 s"):
        pd2.load(tmp_path / "own", run.pipe, run.opt)


def test_saves_that_hang_hold_three_copies_of_the_state_at_most(
    start: Callable[..., Run],
    hang: Hangs,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    tmp_path: Path,
) -> None:
    run = start()
    monkeypatch.setattr(run.pipe.session.control, "timeout", 0.2)
    made: list[HostMemory] = []

    def counted() -> HostMemory:
        made.append(HostMemory())
        return made[-1]

    monkeypatch.setattr("pipedream2bw.checkpoint.save.HostMemory", counted)
    answers, errors = hang("make"), []
    for _ in range(12):
        try:
            run.train(1)
        except OSError as error:
            errors.append(str(error))
    assert len(made) <= 3
    assert len(errors) >= 2
    assert all("in a row could not be saved" in error for error in errors)
    assert "are still being written" in errors[-1]
    texts = [str(warning.message) for warning in recwarn]
    assert any("checkpoint 6 was not saved, training goes on" in text for text in texts), texts
    answers.set()
    for thread in threading.enumerate():
        if thread.name.startswith("pipedream2bw: checkpoint"):
            thread.join(20)
    monkeypatch.setattr(run.pipe.session.control, "timeout", 10.0)
    run.train(2)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run"))[0] == run.pipe.session.accumulation.num_updates
    assert len(made) <= 3


def test_the_first_step_ends_where_the_file_system_hangs(run: Run, hang: Hangs) -> None:
    hang("names")
    with pytest.raises(TimeoutError, match=r"looking for newer checkpoints: .* for 0.5 s"):
        run.train(1)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_is_stopped_ends_where_the_file_system_hangs(
    evaluates: bool,
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    hang: Hangs,
    recwarn: pytest.WarningsRecorder,
) -> None:
    run = start(every=1 if evaluates else 1000, preempt=["SIGUSR1"])
    monkeypatch.setattr(run.pipe.session.control, "timeout", 1.0)
    hang("make")
    run.train(1)
    hang("names")
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(pd2.Preempted):
        if evaluates:  # after a batch that is saved already
            with torch.no_grad():
                run.pipe(X)
        else:
            run.train(2)
    texts = " ".join(str(warning.message) for warning in recwarn)
    assert f"checkpoint {1 if evaluates else 2} took more than 1 s" in texts
    assert ("looking for checkpoint 1: the file system has not answered" in texts) == evaluates


def test_all_saves_together_have_the_time_at_the_programs_end(
    run: Run, hang: Hangs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.setattr(writing, "_ends_soon", weakref.WeakKeyDictionary())  # other tests' threads
    run.train(1)
    hang("make")
    for name in ("one", "two", "three"):
        pd2.save(tmp_path / name, run.pipe, run.opt)
    run.pipe.flush()
    monkeypatch.setattr(writing, "_AT_EXIT_SECONDS", 1.0)
    begun = time.monotonic()
    writing._finish_writing()
    assert 1.0 <= time.monotonic() - begun < 2.9  # not one second for each of the three
    assert caplog.text.count("was not saved: the program ended first") == 3


def test_what_is_slow_but_goes_on_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    folder = Folder(tmp_path)

    def look() -> int:
        found = 0
        for _ in range(10):
            time.sleep(0.1)
            found += folder.holds("nothing")
        with folder.open("file") as file:
            for _ in range(10):
                time.sleep(0.1)
                found += len(file.read(1))
        return found

    call = FolderCall(folder, 1.0, "looking", look)
    assert call.is_done()
    assert call.get() == 10


def test_what_the_folder_raises_is_raised(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    call = FolderCall(folder, 10.0, "reading", lambda: folder.read("nothing"))
    assert call.is_done()
    with pytest.raises(FileNotFoundError):
        call.get()
