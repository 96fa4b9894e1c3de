"""A run saves to an object store and goes on from it, also when what is there is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.__main__ import main
from pipedream2bw.checkpoint.commit import CORRUPT, checkpoints, commit, remove, steps_in
from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder, name_of
from tests.unit.checkpoint.conftest import manifest_of
from tests.unit.checkpoint.test_checkpointer import Run, same


@pytest.fixture
def runs(s3_url: str) -> Iterator[list[Run]]:
    made = [Run(s3_url, keep=2), Run(s3_url, seed=5, keep=2)]
    yield made
    for run in made:
        run.ckpt.close()
        run.pipe.close()


def names(folder: Folder) -> list[str]:
    """All objects, without the folder's own name."""
    folder.fs.invalidate_cache()
    return sorted(path.removeprefix(folder.root) for path in folder.fs.find(folder.root))


def test_a_run_in_an_object_store_is_kept_listed_verified_and_gone_on_with(
    runs: list[Run], s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, resumed = runs
    folder, states = Folder(s3_url), {}
    assert run.ckpt.resume() == 0
    for batch in range(1, 6):
        run.train(1)
        states[batch] = run.state()
    run.ckpt.close()
    assert steps_in(folder) == [5, 4]
    assert {name.split("/")[1] for name in names(folder)} == set(checkpoints(folder))
    assert not [name for name in names(folder) if "part-" in name]
    assert main(["checkpoint", "verify", s3_url]) == 0
    assert main(["checkpoint", "ls", s3_url]) == 0
    assert main(["checkpoint", "show", s3_url]) == 0
    assert resumed.ckpt.resume() == 5
    assert same(resumed.state(), states[5])
    # Both go on with the same bits.
    resumed.train(2)
    resumed.ckpt.close()
    assert steps_in(folder) == [7, 6]

    newest = checkpoints(folder, 7)[0]
    optimizer = next(n for n in names(folder) if n.startswith(f"/{newest}/optimizer"))
    data = bytearray(folder.read(optimizer[1:]))
    data[-1] ^= 1
    with folder.writing(optimizer[1:]) as file:
        file.write(data)
    capsys.readouterr()
    assert main(["checkpoint", "verify", s3_url]) == 1
    assert optimizer[1:] in capsys.readouterr().out
    state, before = run.state(), names(folder)
    assert run.ckpt.resume() == 6
    assert not same(run.state(), state)
    assert names(folder) == sorted([*before, f"/{newest}/{CORRUPT}"])
    assert steps_in(folder) == [6]


def test_what_a_dead_save_left_in_an_object_store_is_removed_and_nothing_else(
    runs: list[Run], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, resumed = runs
    run.train(2)
    run.ckpt.close()
    folder, left = Folder(s3_url), name_of(9, "a")
    with folder.writing(left, "model-00001-of-00001.safetensors") as file:
        file.write(b"half")
    with folder.writing("step-11", "somebody's") as file:
        file.write(b"1")
    assert resumed.ckpt.resume() == 2
    resumed.train(1)
    resumed.ckpt.close()
    assert left in folder.saves(), "it may yet be written by a run that lives"
    monkeypatch.setattr(resumed.pipe.session.control, "timeout", 1.0)
    time.sleep(2.1)  # the store's clock has seconds
    pd2.save(s3_url, resumed.pipe, resumed.opt).wait(60)
    assert {name.split("/")[1] for name in names(folder)} == {*checkpoints(folder), "step-11"}
    assert steps_in(folder) == [3, 2]


def test_what_another_process_writes_is_seen_at_once(s3_url: str) -> None:
    folder, other = Folder(s3_url), Folder(s3_url)
    other.fs = type(folder.fs)(skip_instance_cache=True)  # as that of another process
    assert steps_in(folder) == []
    for step, size in ((1, 10), (2, 20), (1, 30)):
        name = name_of(step, str(size))
        other.make(name)
        assert not folder.holds(name, MANIFEST)
        folder.names(name)  # which it remembers
        with other.writing(name, "data") as file:
            file.write(bytes(size))
        commit(other, name, manifest_of(step))
        assert folder.holds(name, MANIFEST)
        assert checkpoints(folder, step) == [name]
        assert folder.size(name, "data") == size
        with folder.open(name, "data") as file:
            assert file.read() == bytes(size)
        assert folder.names(name) == {"data", INDEX, MANIFEST}
    remove(other, name)
    assert steps_in(folder) == [2]


def test_weights_are_loaded_from_an_object_store_and_others_go_there(
    runs: list[Run], s3_url: str, tmp_path: object
) -> None:
    run, _ = runs
    run.train(1)
    run.ckpt.close()
    out = f"{s3_url}/exported"
    assert main(["checkpoint", "export", s3_url, "--to", "torch", f"{tmp_path}/state.pt"]) == 0
    state = torch.load(f"{tmp_path}/state.pt", weights_only=True)
    assert same([state[name] for name in run.pipe.state_dict()], run.state())
    assert main(["checkpoint", "export", s3_url, "--to", "hf", out]) == 0
    assert any(name.endswith(".safetensors") for name in names(Folder(out)))
