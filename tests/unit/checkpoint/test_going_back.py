"""Which checkpoint a run goes on from, and which ones stay."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import ABANDONED, steps_in
from pipedream2bw.checkpoint.folder import Folder, step_of
from pipedream2bw.checkpoint.frequency import Frequency
from pipedream2bw.errors import DamagedCheckpoint
from tests.runs.saved import saved
from tests.unit.checkpoint.conftest import Run, X

Start = Callable[..., Run]


def states_of(run: Run, batches: int) -> dict[int, list[torch.Tensor]]:
    """Trains, and gives the weights at every batch."""
    states = {}
    for _ in range(batches):
        run.train(1)
        states[run.pipe.session.accumulation.num_updates] = run.state()
    return states


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_saves_after_going_back_have_the_weights_of_their_batch(
    start: Start, tmp_path: Path
) -> None:
    """Versions have numbers that others had before; a copy must wait for the new ones."""
    run = start(every=2, keep=9)
    states = states_of(run, 8)
    run.ckpt.close()
    pd2.load(tmp_path / "run", run.pipe, run.opt, step=2)
    saving = pd2.save(tmp_path / "other", run.pipe, run.opt)  # before any batch
    run.pipe.train_step(X, target=X)
    run.opt.step()
    later = pd2.save(tmp_path / "other", run.pipe, run.opt)
    run.pipe.flush()
    want = run.state()
    for each in (saving, later):
        each.done.result(10)
    other = start(tmp_path / "other", seed=5)
    pd2.load(tmp_path / "other", other.pipe, other.opt, step=2)
    assert same(other.state(), states[2])
    pd2.load(tmp_path / "other", other.pipe, other.opt, step=3)
    assert same(other.state(), want)


def test_going_back_waits_for_the_saves_of_the_other_branch(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=2, keep=9)
    run.train(4)
    sync = os.fsync

    def slowly(file: int) -> None:
        time.sleep(0.05)
        sync(file)

    monkeypatch.setattr(os, "fsync", slowly)
    run.train(2)
    assert run.ckpt.under_way
    assert run.ckpt.resume(step=2) == 2
    assert not run.ckpt.under_way
    assert steps_in(Folder(tmp_path / "run")) == [2]
    assert (saved(tmp_path / "run", 6) / ABANDONED).exists()


def test_a_signal_after_the_batch_was_saved_saves_it_no_second_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"memory://{uuid.uuid4()}"
    begun: list[int] = []
    make = Folder.make

    def slowly(self: Folder, *names: str) -> None:
        begun.extend(map(step_of, names))
        time.sleep(0.2)
        make(self, *names)

    monkeypatch.setattr(Folder, "make", slowly)
    run = start(path, every=2)
    run.train(2)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(pd2.Preempted), torch.no_grad():
        run.pipe(X)
    assert begun == [2]
    assert start(path, seed=3).ckpt.resume() == 2


def test_a_run_that_goes_back_leaves_the_other_branch_aside(start: Start, tmp_path: Path) -> None:
    run = start(every=2, keep=2)
    states = states_of(run, 8)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run")) == [8, 6]
    again = start(seed=3, every=1, keep=2)
    with pytest.raises(ValueError, match=r"step: 4, .* has \[8, 6\]"):
        again.ckpt.resume(step=4)
    assert again.ckpt.resume(step=6) == 6
    assert same(again.state(), states[6])
    again.train(1)
    again.ckpt.close()
    assert steps_in(Folder(tmp_path / "run")) == [7, 6]
    assert (saved(tmp_path / "run", 8) / ABANDONED).exists()
    assert start(seed=4).ckpt.resume() == 7


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(
    start: Start, tmp_path: Path
) -> None:
    run = start(every=2)
    run.train(4)
    run.ckpt.close()
    forgotten = start(every=1)
    with pytest.raises(
        ValueError, match="it has checkpoint 4, this run is at 1: go on with resume"
    ):
        forgotten.train(1)
    pd2.load(tmp_path / "run", forgotten.pipe, forgotten.opt, step=2)
    with pytest.raises(ValueError, match="this run is at 3"):
        forgotten.train(1)
    assert steps_in(Folder(tmp_path / "run")) == [4, 2]


def test_if_no_checkpoint_is_whole_the_run_does_not_begin_anew(
    start: Start, tmp_path: Path
) -> None:
    run = start(every=1)
    run.train(2)
    run.ckpt.close()
    files = [next(saved(tmp_path / "run", n).glob("model-*")) for n in (1, 2)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    again = start(seed=2)
    for _ in range(2):
        with pytest.raises(
            DamagedCheckpoint, match="none of 2 checkpoints is whole: step-00000002"
        ):
            again.ckpt.resume()
    assert steps_in(Folder(tmp_path / "run")) == [2, 1]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=1)
    states = states_of(run, 2)
    run.ckpt.close()
    opened = Folder.open

    def broken(self: Folder, *names: str, **options: Any) -> Any:
        if step_of(names[0]) == 2:
            raise OSError(5, "Input/output error")
        return opened(self, *names, **options)

    monkeypatch.setattr(Folder, "open", broken)
    monkeypatch.setattr("pipedream2bw.checkpoint.load.time.sleep", lambda seconds: None)
    again = start(seed=2)
    assert again.ckpt.resume() == 1
    assert same(again.state(), states[1])


def test_what_is_read_only_after_a_while_is_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=1)
    run.train(2)
    run.ckpt.close()
    opened, failures = Folder.open, [True, True]

    def slow(self: Folder, *names: str, **options: Any) -> Any:
        if failures:
            failures.pop()
            raise OSError(116, "Stale file handle")
        return opened(self, *names, **options)

    monkeypatch.setattr(Folder, "open", slow)
    monkeypatch.setattr("pipedream2bw.checkpoint.load.time.sleep", lambda seconds: None)
    assert start(seed=2).ckpt.resume() == 2


def test_the_first_of_every_so_many_stays_whenever_saves_come(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every="auto", keep=2, keep_every=10)
    due = {3, 8, 13, 17, 24, 36, 38}
    monkeypatch.setattr(
        Frequency, "is_due", lambda _: run.pipe.session.accumulation.num_updates + 1 in due
    )
    for _ in range(40):
        run.train(1)
        for saving in run.ckpt.under_way:
            run.pipe.flush()
            saving.done.result(10)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run")) == [38, 36, 24, 13]


def test_a_signal_in_an_evaluation_waits_until_the_batch_is_counted(start: Start) -> None:
    run = start(every=100)
    run.train(2)
    os.kill(os.getpid(), signal.SIGTERM)
    run.pipe.train_step(X, target=X)
    run.opt.step()
    with torch.no_grad():
        run.pipe(X)  # the data's position is counted after it
    with pytest.raises(pd2.Preempted):
        run.ckpt.step()
    assert start(seed=3).ckpt.resume() == 3


def test_a_write_that_never_returns_fails_and_the_next_is_made(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every="0.01s")
    make, hangs = Folder.make, threading.Event()
    number = 0

    def wait(self: Folder, *names: str) -> None:
        nonlocal number
        number += 1
        if number == 1:
            hangs.wait(30)
        make(self, *names)

    monkeypatch.setattr(Folder, "make", wait)
    monkeypatch.setattr(run.pipe.session.control, "timeout", 0.3)

    def until_the_next() -> None:
        while number < 2:
            run.train(1)

    with pytest.warns(UserWarning, match=r"TimeoutError: .*took more than 0.3 s"):
        until_the_next()
    hangs.set()
    monkeypatch.setattr(run.pipe.session.control, "timeout", 10.0)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run"))


class Changing:
    """Its state cannot be saved any more after a while."""

    def __init__(self) -> None:
        self.value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_state_that_cannot_be_saved_is_refused_at_once_and_warned_of_later(start: Start) -> None:
    changing = Changing()
    changing.value = {1, 2}
    with pytest.raises(TypeError, match="set"):
        start(extra={"mine": changing})
    changing.value = 1
    run = start(extra={"mine": changing})
    run.train(1)
    changing.value = {1, 2}
    with pytest.warns(UserWarning, match="checkpoint 2 was not saved.*TypeError.*set"):
        run.train(1)
    changing.value = 2
    run.train(1)
    run.ckpt.close()
    assert start(seed=2, extra={"mine": changing}).ckpt.resume() == 3


def test_an_evaluation_in_a_save_does_not_make_saves_rare() -> None:
    frequency = Frequency("auto", 0.035)
    for _ in range(10):
        frequency.batch_ended(1.0, is_saving=False)
    frequency.save_began()
    frequency.batch_ended(None, is_saving=True)
    frequency.batch_ended(1.1, is_saving=True)
    frequency.save_ended(1.0)
    assert frequency.batches == 3
    for stalled in (600.0, 600.0):  # the data came late
        frequency.save_began()
        frequency.batch_ended(stalled, is_saving=True)
        frequency.save_ended(1.0)
    assert frequency.batches == 12
    for _ in range(6):
        frequency.save_began()
        frequency.batch_ended(1.0, is_saving=True)
        frequency.save_ended(1.0)
    assert frequency.batches <= 3
