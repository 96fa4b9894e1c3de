"""A run saves to an object store and goes on from it, also when what is there is damaged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipedream2bw.__main__ import main
from pipedream2bw.checkpoint.folder import MANIFEST, UNFINISHED, Folder
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
    assert folder.steps() == [5, 4]
    assert {name.split("/")[1] for name in names(folder)} == {"step-00000005", "step-00000004"}
    assert not [name for name in names(folder) if "part-" in name or UNFINISHED in name]
    assert main(["checkpoint", "verify", s3_url]) == 0
    assert main(["checkpoint", "ls", s3_url]) == 0
    assert main(["checkpoint", "show", s3_url]) == 0
    assert resumed.ckpt.resume() == 5
    assert same(resumed.state(), states[5])
    # Both go on with the same bits.
    resumed.train(2)
    resumed.ckpt.close()
    assert folder.steps() == [7, 6]

    optimizer = next(n for n in names(folder) if n.startswith("/step-00000007/optimizer"))
    data = bytearray(folder.read(optimizer[1:]))
    data[-1] ^= 1
    with folder.writing(optimizer[1:]) as file:
        file.write(data)
    capsys.readouterr()
    assert main(["checkpoint", "verify", s3_url]) == 1
    assert optimizer[1:] in capsys.readouterr().out
    state = run.state()
    assert run.ckpt.resume() == 6
    assert not same(run.state(), state)
    aside = [name for name in names(folder) if name.startswith("/step-00000007.corrupt/")]
    assert len(aside) == len([n for n in names(folder) if n.startswith("/step-00000006/")])
    assert not [name for name in names(folder) if name.startswith("/step-00000007/")]


def test_what_an_interrupted_save_left_in_an_object_store_is_removed_and_nothing_else(
    runs: list[Run], s3_url: str
) -> None:
    run, resumed = runs
    run.train(2)
    run.ckpt.close()
    folder = Folder(s3_url)
    with folder.writing(folder.begin(9, "a"), "model-00001-of-00001.safetensors") as file:
        file.write(b"half")
    with folder.writing("step-00000011", "somebody's") as file:
        file.write(b"1")
    assert folder.steps() == [2, 1]
    assert resumed.ckpt.resume() == 2
    assert {name.split("/")[1] for name in names(folder)} == {
        "step-00000001",
        "step-00000002",
        "step-00000011",
    }


def test_a_step_that_is_saved_again_is_whole_meanwhile(s3_url: str) -> None:
    folder = Folder(s3_url)
    for nonce in ("a", "b"):
        name = folder.begin(3, nonce)
        assert folder.steps() == ([] if nonce == "a" else [3])
        with folder.writing(name, "data") as file:
            file.write(nonce.encode())
        folder.commit(name, 3, b"{}")
        folder.end_save(name)
        assert folder.steps() == [3]
        assert folder.read(name, "data") == nonce.encode()
    assert names(folder) == [f"/step-00000003/{MANIFEST}", "/step-00000003/data"]


def test_what_another_process_writes_is_seen_at_once(s3_url: str) -> None:
    folder, other = Folder(s3_url), Folder(s3_url)
    other.fs = type(folder.fs)(skip_instance_cache=True)  # as that of another process
    assert folder.steps() == []
    for step, size in ((1, 10), (2, 20), (1, 30)):
        name = other.begin(step, str(size))
        assert folder.holds(name, MANIFEST) == (size == 30)
        folder.fs.ls(folder.at(name))  # which it remembers
        with other.writing(name, "data") as file:
            file.write(bytes(size))
        other.commit(name, step, b"{}")
        assert folder.holds(name, MANIFEST)
        assert step in folder.steps()
        assert folder.size(name, "data") == size
        with folder.open(name, "data") as file:
            assert file.read() == bytes(size)
    other.remove(1)
    assert folder.steps() == [2]


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
