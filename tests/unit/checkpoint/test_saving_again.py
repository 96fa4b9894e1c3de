"""A step that is saved again is whole at every moment, and is not saved again for nothing."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import MANIFEST, Folder
from pipedream2bw.checkpoint.manifest import read_manifest
from pipedream2bw.checkpoint.source import Source
from pipedream2bw.errors import StageError
from tests.unit.checkpoint.conftest import Run, X
from tests.unit.checkpoint.trained_run import Keeper


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4()}"


def newest(path: str) -> str:
    """The nonce of the newest checkpoint, of which every byte has been compared."""
    source = Source.newest(Folder(path))
    for name in source.manifest.files:
        source.check_file(name, sums=True)
    return source.manifest.nonce


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
                    found = stock(*args, **options)
                    look()
                finally:
                    looks = False
                return found

            monkeypatch.setattr(owner, name, call)

        for name in ("rename", "rmdir", "fsync", "remove", "unlink"):
            looking(os, name)
        for name in ("writing", "_remove_file", "_remove_all", "begin"):
            looking(Folder, name)

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
    folder = Folder(path)
    manifest = read_manifest(folder, 1)
    left = {name.rpartition("/")[2] for name in folder.fs.find(folder.root)}
    assert left == {*manifest.files, MANIFEST, "model.safetensors.index.json"}


def test_a_second_save_that_fails_leaves_the_first_one(
    path: str, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=1000)
    run.train(1)
    pd2.save(path, run.pipe, run.opt, extra={"round": 0}).wait()
    first = newest(path)
    writing = Folder.writing
    for full in ("model-", "optimizer-", "rank-", "part-", "model.safetensors.index", MANIFEST):

        def fails(self: Folder, *names: str, full: str = full) -> Any:
            if names[-1].lstrip(".").startswith(full):
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
