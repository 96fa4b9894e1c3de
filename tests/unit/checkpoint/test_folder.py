"""A checkpoint is there as a whole or not at all, in a file system and in an object store."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder
from pipedream2bw.checkpoint.manifest import of_bytes
from pipedream2bw.checkpoint.replacing import clean, commit
from tests.fuzz.formats import corpus_of


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "s3":
        return Folder(request.getfixturevalue("s3_url"))
    path = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4()}"
    return Folder(path)


def put(folder: Folder, step: int, nonce: str = "a", *, commit: bool = True) -> str:
    name = folder.begin(step, nonce)
    with folder.writing(name, "data") as file:
        file.write(f"{nonce} {step}".encode())
    if commit:
        folder.commit(name, step, b"{}")
        folder.end_save(name)
    return name


def test_only_what_is_committed_is_there_newest_first(folder: Folder) -> None:
    assert folder.steps() == []
    for step in (3, 100_000_000, 7):
        put(folder, step)
    put(folder, 9, commit=False)
    assert folder.steps() == [100_000_000, 7, 3]
    assert folder.read("step-00000007", "data") == b"a 7"
    assert folder.size("step-00000007", "data") == 3
    assert folder.holds("step-00000007", MANIFEST)
    assert not folder.holds("step-00000007", "other")


def test_what_was_interrupted_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    put(folder, 3)
    name = put(folder, 4, commit=False)
    others = ["step-4", "notes.tmp-1", "step-00000003.corrupt"]
    for other in others:
        (tmp_path / "run" / other).mkdir()
    clean(folder)
    left = {each.name for each in (tmp_path / "run").iterdir()}
    assert left == {"step-00000003", *others}
    assert name not in left


def test_a_step_that_is_saved_again_replaces_the_former_one(folder: Folder) -> None:
    put(folder, 3, "a")
    put(folder, 3, "b")
    assert folder.steps() == [3]
    assert folder.read("step-00000003", "data") == b"b 3"


def test_what_is_set_aside_or_removed_is_no_checkpoint(folder: Folder) -> None:
    for step in (3, 4):
        put(folder, step)
    assert folder.set_aside(4) == "step-00000004.corrupt"
    assert folder.steps() == [3]
    put(folder, 4)
    assert folder.set_aside(4) == "step-00000004.corrupt-2"
    assert folder.read("step-00000004.corrupt", "data") == b"a 4"
    folder.remove(3)
    folder.remove(3)
    assert folder.steps() == []
    assert not folder.holds("step-00000003")


def test_all_folders_that_are_made_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    put(Folder(tmp_path / "runs" / "a"), 1)
    assert synced[:2] == [str(tmp_path), str(tmp_path / "runs")]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What comes to the disk, and what is renamed, by the last name of its path, in order."""
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def syncing(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append(f"sync {path.name}")
        if path.is_file():  # written whole: what has been buffered is there, too
            assert path.stat().st_size > 0
        fsync(handle)

    def renaming(old: str, new: str) -> None:
        seen.append(f"rename {Path(old).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    return seen


def saved(folder: Folder, nonce: str) -> None:
    """Saves step 1 with one file of tensors."""
    manifest = dataclasses.replace(of_bytes(corpus_of("manifest")[0]), batch=1, nonce=nonce)
    (saved_file,) = manifest.files.values()
    name, file_name = folder.begin(1, nonce), f"model-00001-of-00001-{nonce}.safetensors"
    with folder.writing(name, file_name) as file:
        file.write(b"data")
    commit(folder, name, dataclasses.replace(manifest, files={file_name: saved_file}))


def test_each_step_of_a_save_relies_on_what_is_on_the_disk(
    tmp_path: Path, on_disk: list[str]
) -> None:
    folder = Folder(tmp_path)
    saved(folder, "a")
    assert on_disk == [
        "sync model-00001-of-00001-a.safetensors",
        f"sync .{INDEX}",
        f"rename .{INDEX}",
        f"sync {MANIFEST}",
        "sync step-00000001.tmp-a",
        "rename step-00000001.tmp-a",
        f"sync {tmp_path.name}",
    ]


def test_so_does_each_step_of_a_save_that_replaces_another_one(
    tmp_path: Path, on_disk: list[str]
) -> None:
    folder = Folder(tmp_path)
    saved(folder, "a")
    on_disk.clear()
    saved(folder, "b")
    assert on_disk == [
        "sync model-00001-of-00001-b.safetensors",
        f"sync .{INDEX}",
        f"rename .{INDEX}",
        f"sync {MANIFEST}",
        "sync step-00000001.tmp-b",
        "rename model-00001-of-00001-b.safetensors",
        "sync step-00000001",
        f"rename {MANIFEST}",
        "sync step-00000001",
        f"rename {INDEX}",
        "sync step-00000001",
        f"sync {tmp_path.name}",
        f"sync {tmp_path.name}",
    ]
    assert not folder.holds("step-00000001", "model-00001-of-00001-a.safetensors")


class Store(MemoryFileSystem):
    """Whose errors are its own, as those of the packages for object stores."""

    protocol = "store"

    class Error(Exception):
        pass

    def __getattribute__(self, name: str) -> Any:
        if name in ("ls", "info", "_open", "cat_file", "makedirs", "rm_file", "size", "modified"):
            raise Store.Error("out of reach")
        return super().__getattribute__(name)


def test_whatever_fails_in_a_place_is_an_os_error() -> None:
    fsspec.register_implementation("store", Store, clobber=True)
    folder = Folder("store://run")
    for call in (
        folder.steps,
        folder.make,
        lambda: folder.begin(1, "a"),
        lambda: folder.commit("step-00000001", 1, b""),
        lambda: folder.remove(1),
        lambda: folder.set_aside(1),
        lambda: folder.read("a"),
        lambda: folder.size("a"),
        lambda: folder.written(1),
        lambda: folder.holds("a"),
        lambda: folder.open("a").__enter__(),
        lambda: folder.writing("a").__enter__(),
    ):
        with pytest.raises(OSError, match=r"Store\.Error: out of reach|Error: out of reach"):
            call()
    clean(folder)
    folder.discard("a", "b")
    folder.remove_file("a")


def test_a_place_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Folder("nowhere://x")


def test_a_removal_that_ends_half_way_is_finished_later(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, 3)
    put(folder, 5)
    with monkeypatch.context() as patch:

        def end(*args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(folder.fs, "rm", end)
        with pytest.raises(KeyboardInterrupt):
            folder.remove(3)
    assert folder.steps() == [5]
    clean(folder)
    assert {each.split("/")[-2] for each in folder.fs.find(folder.root)} == {"step-00000005"}
    folder.remove(3)
    folder.remove(5)
    assert folder.fs.find(folder.root) == []
