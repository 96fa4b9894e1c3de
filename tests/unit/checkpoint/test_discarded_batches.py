"""A save of what a discarded batch would have led to fails, and the next one does not."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import Folder

X = torch.randn(8, 4)
BAD = torch.full((8, 4), float("nan"))


@contextlib.contextmanager
def pipeline() -> Iterator[tuple[pd2.PipelineModule, pd2.PipelineOptimizer, threading.Event]]:
    """Fails at a bad target, but not before the event."""
    go = threading.Event()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if bool(target.isnan().any()):
            assert go.wait(20)
            raise ZeroDivisionError("on purpose")
        return mse_loss(output, target)

    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Linear(4, 4),
    ]
    pipe = pd2.PipelineModule(layers, loss_fn, num_microbatches=2, example_args=(X[:2],))
    with pipe:
        yield pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1)), go


def test_a_save_after_a_discarded_batch_fails_and_one_before_it_does_not(tmp_path: Path) -> None:
    with pipeline() as (pipe, opt, go):
        pipe.train_step(X, target=X)
        opt.step()
        before = pd2.save(tmp_path / "before", pipe, opt)
        pipe.train_step(X, target=BAD)
        opt.step()
        after = pd2.save(tmp_path / "after", pipe, opt)
        go.set()
        with pytest.raises(pd2.errors.StageError, match="batch 1, microbatch 0, forward") as raised:
            pipe.flush()
        assert raised.value.discarded == (1,)
        before.done.result(20)
        with pytest.raises(pd2.errors.StageError, match="batch 1 was discarded before batch 2"):
            after.done.result(20)
        with pytest.raises(pd2.errors.StageError, match="batch 1 was discarded before batch 2"):
            after.snapshot.result(0)

        want = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.train_step(X, target=X)
        opt.step()
        pd2.save(tmp_path / "after", pipe, opt).wait()
        pd2.load(tmp_path / "before", pipe, opt)
        got = pipe.state_dict()
        assert all(torch.equal(got[name], want[name]) for name in want)
        pd2.load(tmp_path / "after", pipe, opt)
        assert pipe.session.num_train_steps == 2


def test_after_a_load_batches_are_discarded_by_their_new_numbers(tmp_path: Path) -> None:
    with pipeline() as (pipe, opt, go):
        go.set()
        for _ in range(2):
            pipe.train_step(X, target=X)
            opt.step()
        pd2.save(tmp_path, pipe, opt).wait()
        want = {name: value.clone() for name, value in pipe.state_dict().items()}
        for _ in range(3):
            pipe.train_step(X, target=X)
            opt.step()
        pd2.load(tmp_path, pipe, opt)
        with torch.no_grad(), pytest.raises(pd2.errors.StageError, match="evaluation") as raised:
            pipe(torch.randn(8, 5))
        assert raised.value.discarded == ()
        pipe.train()
        pipe.train_step(X, target=BAD)
        opt.step()
        with pytest.raises(pd2.errors.StageError) as raised:
            pipe.flush()
        assert raised.value.discarded == (2,)
        got = pipe.state_dict()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_checkpointer_does_not_count_it_as_a_failure_of_the_storage(tmp_path: Path) -> None:
    with pipeline() as (pipe, opt, go), warnings_of_saves() as seen:
        ckpt = pd2.Checkpointer(tmp_path, pipe, opt, every=1)
        for _ in range(5):
            go.clear()
            pipe.train_step(X, target=BAD)
            opt.step()
            ckpt.step()
            go.set()
            with pytest.raises(pd2.errors.StageError):
                pipe.flush()
            pipe.train_step(X, target=X)
            opt.step()
            ckpt.step()
        ckpt.close()
    assert len(seen) == 5
    assert all("was discarded before batch" in str(warning.message) for warning in seen)


def documented_loop() -> str:
    """The guide's, over batches of which some are bad."""
    page = (Path(__file__).parents[3] / "docs/guide/failures.md").read_text("utf-8")
    (loop,) = re.findall(r"```python\n(for x, y in loader:\n[^`]*error\.discarded[^`]*)```", page)
    return str(loop)


@pytest.mark.parametrize("is_known", [False, True], ids=["a batch later", "before ckpt.step()"])
def test_the_documented_loop_goes_past_bad_batches(is_known: bool, tmp_path: Path) -> None:
    targets = [X] * 12
    for bad in (4, 8, 9):
        targets[bad] = BAD
    sampler = pd2.ResumableSampler(12, 1, shuffle=False)
    given: list[int] = []
    positions: list[tuple[int, int]] = []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (row,) in sampler:
            given.append(row)
            yield X, targets[row]

    with pipeline() as (pipe, opt, go), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of saves that the bad batches have ended
        go.set()
        ckpt = pd2.Checkpointer(tmp_path, pipe, opt, data=sampler, every=1, preempt=())

        class Waiting:
            def step(self) -> None:
                opt.step()
                positions.append((sampler.position, len(given)))
                if is_known:
                    time.sleep(0.1)

        names = {"loader": loader(), "pipe": pipe, "opt": Waiting(), "ckpt": ckpt}
        exec(documented_loop(), {**names, "sampler": sampler, "pd2": pd2})
        assert given == list(range(12))
        assert [position for position, _ in positions] == [count for _, count in positions]
        assert sampler.position == 12
        ckpt.close()
        assert 12 - 2 * 3 <= pipe.session.num_train_steps <= 12 - 3


@contextlib.contextmanager
def warnings_of_saves() -> Iterator[list[object]]:
    with pytest.warns(UserWarning, match="was not saved") as seen:
        yield seen.list


def test_a_last_batch_that_is_bad_leaves_the_saves_before_it_and_the_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def slowly(file: int) -> None:
        time.sleep(0.05)
        sync(file)

    monkeypatch.setattr(os, "fsync", slowly)
    before = signal.getsignal(signal.SIGTERM)
    with pipeline() as (pipe, opt, go):
        with (
            pytest.raises(pd2.errors.StageError) as raised,
            pd2.Checkpointer(tmp_path, pipe, opt, every=1) as ckpt,
        ):
            for target in (X, BAD):
                pipe.train_step(X, target=target)
                opt.step()
                if target is X:
                    ckpt.step()
            go.set()
        assert raised.value.discarded == (1,)
        assert signal.getsignal(signal.SIGTERM) == before
        assert steps_in(Folder(tmp_path)) == [1]


@pytest.mark.parametrize("is_known", [False, True], ids=["in the drain", "before ckpt.step()"])
def test_a_signal_in_a_bad_batch_saves_the_run_without_it(is_known: bool, tmp_path: Path) -> None:
    with pipeline() as (pipe, opt, go):
        ckpt = pd2.Checkpointer(tmp_path, pipe, opt, every=100)
        for target in (X, X, BAD):
            if target is BAD:
                os.kill(os.getpid(), signal.SIGTERM)
            pipe.train_step(X, target=target)
            opt.step()
            if target is X:
                ckpt.step()
        go_later = threading.Timer(0.0 if is_known else 0.3, go.set)
        go_later.start()
        while is_known and pipe.session.control.discards.first is None:
            time.sleep(0.01)
        warns = pytest.warns(UserWarning, match="on purpose.* train_step 2 was discarded")
        with warns, pytest.raises(pd2.Preempted):
            ckpt.step()
    assert steps_in(Folder(tmp_path)) == [2]


def test_a_signal_before_the_end_saves_the_run_without_the_last_batch_that_is_bad(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(pd2.Preempted),
        pipeline() as (pipe, opt, go),
        pd2.Checkpointer(tmp_path, pipe, opt, every=9) as ckpt,
    ):
        for target in (X, BAD):
            pipe.train_step(X, target=target)
            opt.step()
            ckpt.step()
        os.kill(os.getpid(), signal.SIGTERM)
        go.set()
    assert steps_in(Folder(tmp_path)) == [1]


def test_a_loss_from_before_a_load_is_not_one_of_a_batch_discarded_after_it(tmp_path: Path) -> None:
    with pipeline() as (pipe, opt, go):
        go.set()
        pipe.train_step(X, target=X)
        opt.step()
        pd2.save(tmp_path, pipe, opt).wait()
        for _ in range(3):
            loss = pipe.train_step(X, target=X)
            opt.step()
        pd2.load(tmp_path, pipe, opt)
        discarded = pipe.train_step(X, target=BAD)
        opt.step()
        with pytest.raises(pd2.errors.StageError):
            pipe.flush()
        assert math.isnan(float(discarded))
        assert float(loss) > 0
