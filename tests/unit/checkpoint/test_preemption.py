"""A signal of a scheduler is never lost: the run is saved, or it does what it did before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import Folder
from tests.runs.saved import saved
from tests.unit.checkpoint.conftest import Run, X, Y

Start = Callable[..., Run]


@pytest.fixture
def handed_on() -> Iterator[list[int]]:
    """The signals that came to the handler that was there before."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def come() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_one_after_the_last_step_saves_the_run_and_ends_it(
    start: Start, tmp_path: Path, handed_on: list[int]
) -> None:
    run = start(every=100)
    with pytest.raises(pd2.Preempted) as ended, run.ckpt:
        run.train(3)
        come()
    assert ended.value.code == 128 + signal.SIGTERM
    assert steps_in(Folder(tmp_path / "run")) == [3]
    assert not run.pipe.session.ending.is_open
    run.ckpt.close()
    assert handed_on == []


def test_one_after_a_last_step_that_is_saved_ends_the_run(start: Start, tmp_path: Path) -> None:
    run = start(every=3)
    run.train(3)
    come()
    with pytest.raises(pd2.Preempted):
        run.ckpt.close()
    assert list((tmp_path / "run").iterdir()) == [saved(tmp_path / "run", 3)]


def test_one_in_a_batch_that_is_not_counted_does_what_it_did_before(
    start: Start, tmp_path: Path, handed_on: list[int]
) -> None:
    run = start(every=2)
    run.train(2)
    come()
    run.pipe.train_step(X, target=Y)
    run.opt.step()
    assert handed_on == []
    run.ckpt.close()
    assert handed_on == [signal.SIGTERM]
    run.ckpt.close()
    assert handed_on == [signal.SIGTERM]
    assert steps_in(Folder(tmp_path / "run")) == [2]


@pytest.mark.parametrize("fails", ["the program", "the pipeline"])
def test_one_before_an_error_does_what_it_did_before(
    fails: str, start: Start, handed_on: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = start(every=100)
    run.train(1)
    with pytest.raises((KeyError, pd2.errors.StageError)), run.ckpt:
        come()
        if fails == "the program":
            raise KeyError("mine")
        run.pipe.abort()
        run.train(1)
    assert handed_on == [signal.SIGTERM]
    assert "SIGTERM came before this error" in caplog.text
    assert ("mine" if fails == "the program" else "abort() was called") in caplog.text


def test_a_checkpointer_that_is_refused_leaves_signals_alone(start: Start) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for wrong, kind in (({"extra": {"seen": {1, 2}}}, TypeError), ({"keep": 0}, ValueError)):
        with pytest.raises(kind):
            start(**wrong)
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNAL"])
def test_what_nobody_can_notice_is_refused(name: str, start: Start) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=f"preempt: '{name}', it must be one of"):
        start(preempt=["SIGTERM", name])
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_that_is_named_twice_is_given_back(start: Start) -> None:
    before = signal.getsignal(signal.SIGTERM)
    start(preempt=["SIGTERM", "SIGTERM"]).ckpt.close()
    assert signal.getsignal(signal.SIGTERM) == before
