"""A step that is saved again is whole at every moment, and is not saved again for nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import checkpoints, clean, steps_in
from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder
from pipedream2bw.checkpoint.manifest import read_manifest
from pipedream2bw.checkpoint.source import Source, damage_of
from pipedream2bw.errors import StageError
from tests.unit.checkpoint.conftest import Run, X
from tests.unit.checkpoint.trained_run import Keeper


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4()}"


def newest(path: str) -> str:
    """The nonce of the newest checkpoint, of which every byte has been compared."""
    folder = Folder(path)
    name = checkpoints(folder)[0]
    assert list(damage_of(folder, name, sums=True)) == []
    return Source(folder, name).manifest.nonce


def with_files(folder: Folder) -> set[str]:
    """What is in the folder, but for folders that are empty, of which a store knows nothing."""
    return {name for name in folder.names() if folder.names(name)}


def assert_nothing_else(path: str) -> None:
    """Nothing is there but whole checkpoints of step 1."""
    folder = Folder(path)
    names = checkpoints(folder, 1)
    assert with_files(folder) == set(names)
    for name in names:
        assert list(damage_of(folder, name, sums=True)) == []
    files = set(read_manifest(folder, names[0]).files)
    assert files | {MANIFEST, INDEX} <= folder.names(names[0])


CHANGES = {
    os: ("rename", "replace", "link", "rmdir", "fsync", "remove", "unlink"),
    Folder: ("make", "writing", "write_nothing", "remove"),
}
"""What changes a file system."""


@pytest.fixture
def look_always(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Lets a function look before and after each call that changes the file system."""

    def begin(look: Callable[[], None]) -> None:
        looks = False

        def looking(owner: Any, name: str) -> None:
            stock = getattr(owner, name)

            def call(*args: Any, **options: Any) -> Any:
                nonlocal looks
                if looks:
                    return stock(*args, **options)
                looks = True
                look()
                try:
                    found = None if name == "fsync" else stock(*args, **options)  # takes long
                    look()
                finally:
                    looks = False
                return found

            monkeypatch.setattr(owner, name, call)

        for owner, names in CHANGES.items():
            for name in names:
                looking(owner, name)

    return begin


def test_a_step_that_is_saved_again_is_whole_at_every_moment(
    path: str, start: Callable[..., Run], look_always: Callable[[Callable[[], None]], None]
) -> None:
    run = start(every=1000)
    run.train(1)
    seen = []
    with_looks = False
    for round_ in range(3):
        pd2.save(path, run.pipe, run.opt, extra={"round": round_}).wait()
        if not with_looks:
            look_always(lambda: seen.append(newest(path)))
            with_looks = True
    nonces = list(dict.fromkeys(seen))
    assert len(nonces) == 3
    assert seen == sorted(seen, key=nonces.index), "a former one came back"
    assert min(seen.count(nonce) for nonce in nonces) > 3
    assert pd2.load(path, run.pipe, run.opt) == {"round": 2}
    (name,) = checkpoints(Folder(path), 1)
    files = read_manifest(Folder(path), name).files
    assert Folder(path).names(name) == {*files, MANIFEST, INDEX}
    assert_nothing_else(path)


def test_a_second_save_that_fails_leaves_the_first_one(
    path: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=1000)
    run.train(1)
    pd2.save(path, run.pipe, run.opt, extra={"round": 0}).wait()
    first = newest(path)
    writing = Folder.writing
    for full in ("model-", "optimizer-", "rank-", "part-", MANIFEST, INDEX):

        def fails(self: Folder, *names: str, full: str = full) -> Any:
            if names[-1].startswith(full):
                raise OSError(28, "No space left on device")
            return writing(self, *names)

        monkeypatch.setattr(Folder, "writing", fails)
        with pytest.raises(OSError, match="No space left"):
            pd2.save(path, run.pipe, run.opt, extra={"round": 1}).wait()
        assert newest(path) == first
    monkeypatch.setattr(Folder, "writing", writing)
    assert pd2.load(path, run.pipe, run.opt) == {"round": 0}
    pd2.save(path, run.pipe, run.opt, extra={"round": 1}).wait()
    assert pd2.load(path, run.pipe, run.opt) == {"round": 1}
    assert_nothing_else(path)


class Killed(BaseException):
    """A process ends here."""


def calls_of(
    monkeypatch: pytest.MonkeyPatch, kill_at: int, call: Callable[[], Any]
) -> tuple[int, str]:
    """Ends a call before one of its changes of the file system; how many came, and which was last.

    Nothing that follows changes anything, as when the process had been killed.
    """
    count, last = 0, ""

    def ending(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def change(*args: Any, **options: Any) -> Any:
            nonlocal count, last
            count += 1
            if count > kill_at:
                raise Killed
            last = f"{name} {args[-1]}"
            return None if name == "fsync" else stock(*args, **options)  # which takes long

        patch.setattr(owner, name, change)

    with monkeypatch.context() as patch:
        for owner, names in CHANGES.items():
            for name in names:
                ending(owner, name)
        with contextlib.suppress(Killed):
            call()
    return count, last


def test_a_second_save_that_was_killed_anywhere_leaves_a_whole_checkpoint_and_no_more(
    path: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(path, every=1000)
    run.train(1)
    pd2.save(path, run.pipe, run.opt).wait()
    first = newest(path)

    def save_again() -> None:
        pd2.save(path, run.pipe, run.opt).wait()

    found, was_killed, kill_at = [], True, 0
    while was_killed:
        count, last = calls_of(monkeypatch, kill_at, save_again)
        was_killed = count > kill_at
        nonce = newest(path)
        found.append(nonce != first)
        assert run.ckpt.resume() == 1
        assert newest(path) == nonce, last
        clean(Folder(path), -1.0, but="")
        assert newest(path) == nonce, last
        assert_nothing_else(path)
        first, kill_at = nonce, kill_at + 1
    assert found.count(True) > 2  # killed when the manifest was there
    assert found.count(False) > 5


def test_a_first_save_that_was_killed_anywhere_is_whole_or_nothing(
    path: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(path, every=1000)
    run.train(1)
    found, was_killed, kill_at = [], True, 0
    while was_killed:
        place = f"{path}-{kill_at}"
        count, _ = calls_of(
            monkeypatch, kill_at, lambda at=place: pd2.save(at, run.pipe, run.opt).wait()
        )
        was_killed = count > kill_at
        found.append(steps_in(Folder(place)))
        clean(Folder(place), -1.0, but="")
        if found[-1]:
            assert_nothing_else(place)
        else:
            assert not with_files(Folder(place))
        kill_at += 1
    assert found == sorted(found)
    assert found.count([]) > 5
    assert found.count([1]) > 1


def test_a_save_that_another_run_writes_is_not_taken_for_a_dead_one(
    path: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = start(path, every=1000), start(path, every=1000)
    for each in (run, other):
        each.train(1)
    begun, goes_on = threading.Event(), threading.Event()
    writing = Folder.writing

    def waits(self: Folder, *names: str) -> Any:
        if names[-1].startswith("rank-") and not begun.is_set():
            begun.set()
            assert goes_on.wait(60)
        return writing(self, *names)

    monkeypatch.setattr(Folder, "writing", waits)
    saving = pd2.save(path, run.pipe, run.opt)
    run.pipe.flush()
    assert begun.wait(60)
    assert other.ckpt.resume() == 0
    other.train(1)
    pd2.save(path, other.pipe, other.opt).wait()
    goes_on.set()
    saving.wait()
    assert steps_in(Folder(path)) == [2, 1]
    assert list(damage_of(Folder(path), checkpoints(Folder(path), 1)[0], sums=True)) == []


@pytest.mark.parametrize("stops", [False, True])
def test_what_a_run_has_resumed_from_is_not_saved_again(
    stops: bool, start: Callable[..., Run], tmp_path: Path
) -> None:
    first = start(every=2)
    first.train(2)
    first.ckpt.close()
    nonce = newest(str(tmp_path / "run"))
    run = start(every=2, preempt=["SIGUSR1"])
    assert run.ckpt.resume() == 2
    if stops:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(pd2.Preempted), torch.no_grad():
            run.pipe(X)
    else:
        run.ckpt.step()
        run.ckpt.close()
    assert newest(str(tmp_path / "run")) == nonce


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_state_is_saved_again_after_a_batch_was_discarded(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    data = Keeper({"position": 1})
    run = start(every=1, data=data)
    run.train(1)
    run.ckpt.close()
    nonce = newest(str(tmp_path / "run"))
    run.ckpt.step()  # nothing is new
    run.ckpt.close()
    assert newest(str(tmp_path / "run")) == nonce
    with pytest.raises(StageError):
        run.pipe.train_step(X, target=X[:, :3])
        run.opt.step()
        run.pipe.flush()
    data.state = {"position": 2}
    run.ckpt.step()
    run.ckpt.close()
    assert newest(str(tmp_path / "run")) != nonce
    other = Keeper()
    assert start(data=other).ckpt.resume() == 1
    assert other.state == {"position": 2}
