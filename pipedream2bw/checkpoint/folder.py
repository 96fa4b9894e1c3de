"""Where checkpoints are: a folder of this machine, or any place that fsspec knows.

Each checkpoint is a folder in it, ``step-00001000``, that is whole as soon as it has a manifest. In
a file system it is written under another name and renamed when everything is on the disk. An object
store knows no renaming: there the manifest is written last, and an object beside the files says
until then that they are no checkpoint. The other name, or that object, stays until a save has
ended, and has its nonce: so what an interrupted one left can be told from a checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from .tensor_file import Readable

MANIFEST = "checkpoint.json"
INDEX = "model.safetensors.index.json"
"""The file that says in which files the newest weights are, as Hugging Face writes it."""

UNFINISHED = "unfinished"
"""In an object store: is there while a checkpoint is written; holds the save's nonce."""

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-(\d{8,})\.tmp-(\w+)")


class Interrupted(NamedTuple):
    """A save that has not ended, and where it wrote."""

    name: str
    step: int
    nonce: str


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Makes OSErrors of the errors that packages for object stores have, such as botocore's."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__module__}.{type(error).__name__}: {error}") from error


class Folder:
    """A folder of checkpoints.

    Args:
        path: of this machine, or a URL such as ``s3://bucket/run`` (the package that fsspec needs
            for it has to be installed).

    Whatever fails in the place raises OSError.

    Raises:
        ImportError, ValueError: fsspec cannot reach such a place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(os.fspath(path))
        self.path = os.fspath(path)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.num_calls = 0
        """How often the file system has been called: as long as that grows, it answers."""

    def at(self, *names: str) -> str:
        """The path of a file or folder inside, as fsspec wants it."""
        return "/".join((self.root.rstrip("/"), *names))

    def _seen_now(self) -> AbstractFileSystem:
        """The file system, which forgets what it has listed before: other processes write, too."""
        self.num_calls += 1
        self.fs.invalidate_cache()
        return self.fs

    @_errors_of_the_system()
    def steps(self) -> list[int]:
        """The checkpoints, newest first.

        One of this machine that has files and no manifest is among them: it has lost it, and is
        damaged. In an object store such a one may not have ended, or is being removed.
        """
        found = (_STEP.fullmatch(name) for name in self._names())
        steps = [int(match[1]) for match in found if match]
        there = (
            s for s in steps if self.is_whole(s) or (self.is_local and self._names(name_of(s)))
        )
        return sorted(there, reverse=True)

    def is_whole(self, step: int) -> bool:
        """Whether a checkpoint has a manifest."""
        return self.holds(name_of(step), MANIFEST)

    @_errors_of_the_system()
    def names_in(self, name: str) -> list[str]:
        """The names of a checkpoint's files."""
        return self._names(name)

    def _names(self, *folder: str) -> list[str]:
        try:
            entries = self._seen_now().ls(self.at(*folder) if folder else self.root, detail=False)
        except FileNotFoundError:
            return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    # ------------------------------------------------------------------ writing

    @_errors_of_the_system()
    def make(self) -> None:
        """Makes the folder itself."""
        self.fs.makedirs(self.root, exist_ok=True)

    @_errors_of_the_system()
    def begin(self, step: int, nonce: str) -> str:
        """The name under which all ranks write a checkpoint; makes the folder.

        Args:
            nonce: the same on all ranks, another one for every save.
        """
        name = self.name_at_first(step, nonce)
        if self.is_local:
            _make_folders(self.root)
        self.fs.makedirs(self.at(name), exist_ok=True)
        if self.is_local:
            return name
        with self.writing(name, UNFINISHED) as file:
            file.write(nonce.encode())
        return name

    def name_at_first(self, step: int, nonce: str) -> str:
        """The name of a checkpoint until it is whole."""
        return f"{name_of(step)}.tmp-{nonce}" if self.is_local else name_of(step)

    @_errors_of_the_system()
    def write_nothing(self, *names: str) -> None:
        """Makes an empty file, for which a full disk has room."""
        self.fs.touch(self.at(*names), truncate=True)

    @contextlib.contextmanager
    def writing(self, *names: str) -> Iterator[IO[bytes]]:
        """Opens a file to write; at the end its bytes are on the disk."""
        if not self.is_local:
            with _errors_of_the_system(), self.fs.open(self.at(*names), "wb") as remote:
                yield remote
            return
        with open(self.at(*names), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def write(self, *names: str, data: bytes) -> None:
        """Writes a file that others see when it is whole."""
        if not self.is_local:  # no object is there before it is whole
            with self.writing(*names) as file:
                file.write(data)
            return
        *folders, last = names
        with self.writing(*folders, f".{last}") as file:
            file.write(data)
        os.rename(self.at(*folders, f".{last}"), self.at(*names))

    def commit(self, name: str, step: int, manifest: bytes) -> None:
        """Writes the manifest, which makes the checkpoint whole.

        One rank calls it, after all ranks' files are on the disk. If the step was saved before,
        that checkpoint is whole until the manifest is there: the files have other names.
        """
        final = name_of(step)
        with self.writing(name, MANIFEST) as file:
            file.write(manifest)
        if not self.is_local:
            return
        _sync_folder(self.at(name))
        if self.holds(final):
            self._move_into(final, name)
        else:
            os.rename(self.at(name), self.at(final))
        _sync_folder(self.root)

    def _move_into(self, final: str, name: str) -> None:
        """Moves the files of a folder into another one, the manifest after those that it lists."""
        # The index lists other files than the former manifest does, so that it comes last: until
        # then the folder's name says that it may be the former one, whose files are still there.
        files = sorted(os.listdir(self.at(name)), key=lambda f: (f == INDEX, f == MANIFEST))
        for file_name in files:
            if file_name in (MANIFEST, INDEX):
                _sync_folder(self.at(final))
            os.rename(self.at(name, file_name), self.at(final, file_name))
        _sync_folder(self.at(final))

    @_errors_of_the_system()
    def end_save(self, name: str) -> None:
        """Removes what says that a save is under way, after :meth:`commit`."""
        if not self.is_local:
            self._remove_file(name, UNFINISHED)
        elif self.holds(name):  # the step was saved before, so that it was not renamed
            os.rmdir(self.at(name))
            _sync_folder(self.root)

    @_errors_of_the_system()
    def interrupted(self) -> list[Interrupted]:
        """The saves, and removals, that have not ended."""
        found = []
        for name in self._names():
            if self.is_local:
                if match := _TEMPORARY.fullmatch(name):
                    found.append(Interrupted(name, int(match[1]), match[2]))
            elif (match := _STEP.fullmatch(name)) and self.holds(name, UNFINISHED):
                nonce = self.read(name, UNFINISHED).decode(errors="replace")
                found.append(Interrupted(name, int(match[1]), nonce))
        return found

    def is_replaced_by(self, step: int, nonce: str) -> bool:
        """Whether the save has not ended that has exchanged the checkpoint's manifest."""
        name = self.name_at_first(step, nonce)
        if self.is_local:
            return self.holds(name)
        return self.holds(name, UNFINISHED) and self.read(name, UNFINISHED) == nonce.encode()

    def clear(self, save: Interrupted, *, replaces: bool) -> None:
        """Removes what a save that was interrupted has left.

        Args:
            replaces: whether its step has a checkpoint, which stays.
        """
        if replaces and not self.is_local:
            self._remove_file(save.name, UNFINISHED)
        else:
            self._remove_all(save.name)

    def discard(self, name: str, nonce: str) -> None:
        """Removes what a save has written so far, as far as possible.

        Args:
            nonce: the save's. In an object store the names of its files have it if the step was
                saved before; that checkpoint stays.
        """
        with contextlib.suppress(OSError), _errors_of_the_system():
            if self.is_local or not self.holds(name, MANIFEST):
                self._remove_all(name)
                return
            # That it is under way stays there: so the next start removes what ranks tell others.
            for path in self._seen_now().find(self.at(name)):
                if nonce in path.rpartition("/")[2]:
                    self.fs.rm_file(path)

    @_errors_of_the_system()
    def _remove_all(self, name: str) -> None:
        self._seen_now().rm(self.at(name), recursive=True)

    def remove_file(self, *names: str) -> None:
        """Removes a file, if there is one and as far as possible."""
        with contextlib.suppress(OSError):
            self._remove_file(*names)

    @_errors_of_the_system()
    def _remove_file(self, *names: str) -> None:
        self.fs.rm_file(self.at(*names))

    def remove(self, step: int) -> None:
        """Removes a checkpoint. If that ends half-way, it is one of :meth:`interrupted`."""
        name = name_of(step)
        if not self.holds(name):
            return
        if self.is_local:
            removed = f"{name}.tmp-removed"
            if self.holds(removed):  # of a removal that ended half-way
                self._remove_all(removed)
            with _errors_of_the_system():
                os.rename(self.at(name), self.at(removed))
            name = removed
        else:
            with self.writing(name, UNFINISHED) as file:
                file.write(b"")
            self.remove_file(name, MANIFEST)  # from here on it is no checkpoint
        self._remove_all(name)

    @_errors_of_the_system()
    def set_aside(self, step: int, suffix: str = "corrupt") -> str:
        """Renames a checkpoint so that nobody takes it; gives its new name."""
        old = name_of(step)
        name, number = f"{old}.{suffix}", 1
        while self.holds(name):
            number += 1
            name = f"{old}.{suffix}-{number}"
        if self.is_local:
            os.rename(self.at(old), self.at(name))
            return name
        for path in self._seen_now().find(self.at(old)):
            self._seen_now().copy(path, self.at(name) + path.removeprefix(self.at(old)))
        self.remove(step)
        return name

    # ------------------------------------------------------------------ reading

    @contextlib.contextmanager
    def open(self, *names: str, ahead: int = 4 * 2**20) -> Iterator[Readable]:
        """Opens a file to read its bytes.

        Args:
            ahead: bytes that are read more than asked for, in an object store.
        """
        with (
            _errors_of_the_system(),
            self._seen_now().open(self.at(*names), "rb", block_size=ahead) as file,
        ):
            yield _ReadFile(file, self)

    @_errors_of_the_system()
    def read(self, *names: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        data: bytes = self._seen_now().cat_file(self.at(*names))
        return data

    @_errors_of_the_system()
    def size(self, *names: str) -> int:
        """The size of a file."""
        size: int = self._seen_now().size(self.at(*names))
        return size

    def bytes_in(self, name: str) -> int:
        """How many bytes a checkpoint has that is being written, as far as the place tells."""
        with contextlib.suppress(OSError), _errors_of_the_system():
            size: int = self._seen_now().du(self.at(name))
            return size
        return 0

    @_errors_of_the_system()
    def written(self, step: int) -> datetime.datetime | None:
        """When a checkpoint became whole; None if the place does not say."""
        try:
            time: datetime.datetime = self.fs.modified(self.at(name_of(step), MANIFEST))
        except NotImplementedError:
            return None
        return time.astimezone()

    @_errors_of_the_system()
    def holds(self, *names: str) -> bool:
        """Whether there is such a file or folder."""
        try:
            self._seen_now().info(self.at(*names))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


class _ReadFile:
    """A file of the folder that is read, of which the folder counts the calls."""

    def __init__(self, file: Any, folder: Folder) -> None:
        self._file = file
        self._folder = folder

    def seek(self, place: int) -> int:
        new: int = self._file.seek(place)
        return new

    def read(self, size: int = -1) -> bytes:
        self._folder.num_calls += 1
        data: bytes = self._file.read(size)
        return data

    def readinto(self, buffer: memoryview) -> int:
        self._folder.num_calls += 1
        size: int = self._file.readinto(buffer)
        return size


def name_of(step: int) -> str:
    """The folder's name of a checkpoint."""
    return f"step-{step:08d}"


def _make_folders(path: str) -> None:
    """Makes a folder and those it is in, so that they are on the disk."""
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        _make_folders(parent)
        os.makedirs(path, exist_ok=True)
        _sync_folder(parent)


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
