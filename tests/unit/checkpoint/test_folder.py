"""A checkpoint is there as a whole or not at all, in a file system and in an object store."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import uuid
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipedream2bw.checkpoint.commit import (
    ABANDONED,
    CORRUPT,
    checkpoints,
    clean,
    commit,
    failed_name,
    look,
    part_name,
    remove,
    set_aside,
    steps_in,
)
from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder, name_of
from pipedream2bw.checkpoint.manifest import of_bytes, read_manifest
from pipedream2bw.checkpoint.source import damage_of
from tests.fuzz.formats import corpus_of
from tests.unit.checkpoint.conftest import manifest_of


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "s3":
        return Folder(request.getfixturevalue("s3_url"))
    path = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4()}"
    return Folder(path)


def put(folder: Folder, step: int, nonce: str = "a", *, ends: bool = True) -> str:
    name = name_of(step, nonce)
    folder.make(name)
    with folder.writing(name, "data") as file:
        file.write(f"{nonce} {step}".encode())
    folder.write(name, part_name(0), data=b"{}")
    if ends:
        commit(folder, name, manifest_of(step, nonce))
    return name


def test_only_what_is_committed_is_there_newest_first(folder: Folder) -> None:
    assert steps_in(folder) == []
    for step in (3, 100_000_000, 7):
        put(folder, step)
    unfinished = put(folder, 9, ends=False)
    assert look(folder).others == [unfinished]
    assert steps_in(folder) == [100_000_000, 7, 3]
    (name,) = checkpoints(folder, 7)
    assert folder.read(name, "data") == b"a 7"
    assert folder.size(name, "data") == 3
    assert folder.names(name) == {"data", INDEX, MANIFEST}
    assert not folder.holds(name, "other")


def test_a_manifest_that_was_not_written_to_its_end_makes_no_checkpoint(folder: Folder) -> None:
    put(folder, 3)
    name = put(folder, 4, ends=False)
    whole = manifest_of(4).to_json().encode()
    for size in (0, 1, len(whole) // 2, len(whole) - 2):
        folder.write(name, MANIFEST, data=whole[:size])
        assert steps_in(folder) == [3], size
        assert look(folder).others == [name], size
    folder.write(name, MANIFEST, data=whole)  # what follows it does not matter
    assert steps_in(folder) == [4, 3]


def test_a_manifest_that_was_whole_once_stays_a_damaged_checkpoint(folder: Folder) -> None:
    put(folder, 3)
    name = put(folder, 4)
    folder.write(name, MANIFEST, data=folder.read(name, MANIFEST)[:-9])
    assert steps_in(folder) == [4, 3]
    assert list(damage_of(folder, name, sums=False))
    clean(folder, -1.0, but="")
    assert folder.holds(name, "data")


def test_of_two_checkpoints_of_one_step_that_counts_which_became_whole_last(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # each save is killed when it has become whole
        patch.setattr("pipedream2bw.checkpoint.commit.remove", lambda *_: None)
        names = [put(folder, 3, nonce) for nonce in ("b", "a", "c")]
    assert checkpoints(folder) == names[::-1]
    assert steps_in(folder) == [3]
    folder.write(names[2], MANIFEST, data=b"{")
    assert checkpoints(folder)[0] == names[1]
    last = put(folder, 3, "0")
    assert checkpoints(folder) == [last]


def test_checkpoints_of_earlier_versions_count_as_the_first_of_their_step(folder: Folder) -> None:
    old = "step-00000003"
    folder.make(old)
    text = json.loads(manifest_of(3).to_json())
    del text["sum"], text["saved_before"]
    rest = json.dumps(text)[1:].encode()
    folder.write(old, MANIFEST, data=b'{"sum": "%08x",' % zlib.crc32(rest) + rest)
    assert checkpoints(folder) == [old]
    assert read_manifest(folder, old).saved_before == 0
    new = put(folder, 3)
    assert checkpoints(folder) == [new]
    assert read_manifest(folder, new).saved_before == 1
    assert not folder.names(old)


def test_what_is_set_aside_or_removed_is_no_checkpoint(folder: Folder) -> None:
    names = [put(folder, step) for step in (3, 4)]
    set_aside(folder, names[1], CORRUPT)
    assert checkpoints(folder) == [names[0]]
    again = put(folder, 4, "b")
    set_aside(folder, again, ABANDONED)
    assert folder.read(names[1], "data") == b"a 4"
    assert folder.read(again, "data") == b"b 4"
    remove(folder, names[0])
    remove(folder, names[0])
    assert look(folder) == ([], [])
    clean(folder, -1.0, but="")
    assert set(folder.saves()) == {names[1], again}


def test_what_dead_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    kept = [put(folder, 3), *("step-4", "notes-1", "step-00000003.corrupt")]
    for other in kept[1:]:
        (tmp_path / "run" / other).mkdir()
    (tmp_path / "run" / "step-00000007-file").write_text("mine")
    dead, written, failed, begun, removed = (
        put(folder, step, ends=False) for step in (4, 5, 6, 8, 9)
    )
    folder.write_nothing(failed, failed_name(1, has_room=False))
    remove_half(tmp_path / "run" / removed)
    for name in (dead, written, removed):  # as if all that had been a minute ago
        for path in (*(tmp_path / "run" / name).iterdir(), tmp_path / "run" / name):
            os.utime(path, (time.time() - 60,) * 2)
    os.utime(tmp_path / "run" / written / "data")
    clean(folder, 30.0, but=begun)
    left = {each.name for each in (tmp_path / "run").iterdir()}
    assert left == {*kept, written, begun, "step-00000007-file"}
    clean(folder, -1.0, but=begun)
    left = {each.name for each in (tmp_path / "run").iterdir()}
    assert left == {*kept, begun, "step-00000007-file"}


def remove_half(path: Path) -> None:
    """Leaves what a removal leaves that ends after the manifest."""
    (path / part_name(0)).unlink()
    (path / INDEX).write_text("{}")


def test_no_clock_but_the_places_own_tells_who_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    name = put(folder, 4, ends=False)
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: 1e12)
    clean(folder, 30.0, but="")
    assert folder.holds(name)


def test_a_save_whose_files_were_removed_makes_no_checkpoint(folder: Folder) -> None:
    name, file_name = put(folder, 4, ends=False), "model-00001-of-00001.safetensors"
    (of_file,) = of_bytes(corpus_of("manifest")[0]).files.values()
    manifest = dataclasses.replace(manifest_of(4), files={file_name: of_file})
    with pytest.raises(OSError, match=f"{file_name} is gone"):
        commit(folder, name, manifest)
    assert steps_in(folder) == []


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
    """What comes to the disk, and what is removed, by the last name of its path, in order."""
    seen: list[str] = []
    fsync = os.fsync

    def syncing(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        seen.append(f"sync {path.name}")
        if path.is_file():  # written whole: what has been buffered is there, too
            assert path.stat().st_size > 0
        fsync(handle)

    def removing(self: Folder, *names: str) -> None:
        seen.append(f"remove {names[-1]}")
        stock(self, *names)

    stock = Folder.remove
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Folder, "remove", removing)
    for name in ("rename", "replace", "link"):
        monkeypatch.delattr(os, name)
    return seen


def test_each_step_of_a_save_relies_on_what_is_on_the_disk(
    tmp_path: Path, on_disk: list[str]
) -> None:
    folder = Folder(tmp_path)
    save = [
        f"sync {tmp_path.name}",
        "sync data",
        f"sync {part_name(0)}",
        f"sync {INDEX}",
        "sync step-00000001-a",
        f"sync {MANIFEST}",
        "sync step-00000001-a",
        f"sync {tmp_path.name}",
        f"remove {part_name(0)}",
    ]
    put(folder, 1, "a")
    assert on_disk == save
    on_disk.clear()
    put(folder, 1, "b")
    assert on_disk == [
        *(each.replace("1-a", "1-b") for each in save),
        f"remove {MANIFEST}",
        "sync step-00000001-a",
        "remove step-00000001-a",
    ]


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
        folder.saves,
        folder.make,
        lambda: steps_in(folder),
        lambda: commit(folder, "step-00000001-a", manifest_of(1)),
        lambda: remove(folder, "step-00000001-a"),
        lambda: set_aside(folder, "step-00000001-a", CORRUPT),
        lambda: folder.read("a"),
        lambda: folder.size("a"),
        lambda: folder.written("a"),
        lambda: folder.holds("a"),
        lambda: folder.open("a").__enter__(),
        lambda: folder.writing("a").__enter__(),
    ):
        with pytest.raises(OSError, match=r"Store\.Error: out of reach|Error: out of reach"):
            call()
    clean(folder, 0.0, but="")


def test_a_place_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Folder("nowhere://x")


def test_a_removal_that_ends_half_way_is_finished_later(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = put(folder, 3), put(folder, 5)
    with monkeypatch.context() as patch:
        stock = Folder.remove

        def end(self: Folder, *names: str) -> None:
            if len(names) == 1:
                raise KeyboardInterrupt
            stock(self, *names)

        patch.setattr(Folder, "remove", end)
        with pytest.raises(KeyboardInterrupt):
            remove(folder, old)
    assert checkpoints(folder) == [new]
    clean(folder, -1.0, but="")
    assert folder.saves() == [new]
    remove(folder, new)
    assert folder.fs.find(folder.root) == []
