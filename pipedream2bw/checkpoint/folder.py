"""Where checkpoints are: a folder of this machine, or any place that fsspec knows.

Each save writes a folder of its own in it, and nothing there is ever renamed: what an object store
and a disk can both do. ``commit.py`` says which of these folders are checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
from collections.abc import Iterator
from typing import IO, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..errors import DamagedCheckpoint

MANIFEST = "checkpoint.json"
INDEX = "model.safetensors.index.json"
"""The file that says in which files the newest weights are, as Hugging Face writes it."""

_SAVE = re.compile(r"step-(\d{8,})(-\w+)?")
"""The name of a save's folder; earlier versions wrote it without a nonce."""


_RUN_LENGTH = 8

_MOST_BYTES = 2**28
"""The size that no manifest or other document has: those of some million tensors are smaller."""

_MOST_HOLES = 2**36
"""Bytes of a file that need not be on the disk; they are read in a minute."""


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Makes OSErrors of the errors that packages for object stores have, such as botocore's."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, ValueError)) or type(error).__module__ == "builtins":
            raise
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

    def saves(self) -> list[str]:
        return [name for name in self.names() if _SAVE.fullmatch(name)]

    @_errors_of_the_system()
    def names(self, *folder: str) -> set[str]:
        """The names of what is in a folder; none if there is no such folder."""
        try:
            paths = self._seen_now().ls(self.at(*folder) if folder else self.root, detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    # ------------------------------------------------------------------ writing

    @_errors_of_the_system()
    def make(self, *names: str) -> None:
        """Makes a folder inside, or the folder itself, and those that it is in."""
        whole = path = self.at(*names) if names else self.root
        parents = []
        while path and not self._seen_now().exists(path):
            path = path.rpartition("/")[0]
            parents.append(path)
        self.fs.makedirs(whole, exist_ok=True)
        for parent in reversed(parents):
            self._sync(parent)

    @_errors_of_the_system()
    def write_nothing(self, *names: str) -> None:
        """Makes an empty file, for which a full disk has room."""
        self.fs.touch(self.at(*names), truncate=True)

    @contextlib.contextmanager
    def writing(self, *names: str) -> Iterator[IO[bytes]]:
        """Opens a file to write; at the end its bytes are on the disk."""
        with _errors_of_the_system():
            with self.fs.open(self.at(*names), "wb") as file:
                yield file
            self._sync(self.at(*names))

    def write(self, *names: str, data: bytes) -> None:
        """Writes a file; on a disk others may see a part of it before it is whole."""
        with self.writing(*names) as file:
            file.write(data)

    def sync(self, *names: str) -> None:
        """Lets the names in a folder be on the disk."""
        self._sync(self.at(*names) if names else self.root)

    def _sync(self, path: str) -> None:
        if isinstance(self.fs, LocalFileSystem):  # an object is there for good once it is written
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @_errors_of_the_system()
    def remove(self, *names: str) -> None:
        """Removes a file, or a folder with all that is in it.

        Raises:
            FileNotFoundError: there is none.
        """
        self._seen_now().rm(self.at(*names), recursive=True)

    # ------------------------------------------------------------------ reading

    @contextlib.contextmanager
    def open(self, *names: str, ahead: int = 4 * 2**20) -> Iterator[io.BufferedIOBase]:
        """Opens a file to read its bytes.

        Args:
            ahead: bytes that are read more than asked for, in an object store.
        """
        with (
            _errors_of_the_system(),
            self._seen_now().open(self.at(*names), "rb", block_size=ahead) as file,
        ):
            counted: Any = _CountedFile(file, self)
            yield counted

    @_errors_of_the_system()
    def read(self, *names: str) -> bytes:
        """All bytes of a document.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedCheckpoint: it is larger than any that is written.
        """
        fs, path = self._seen_now(), self.at(*names)
        if fs.size(path) > _MOST_BYTES:
            raise DamagedCheckpoint(f"more than {_MOST_BYTES} bytes, which no save writes there")
        data: bytes = fs.cat_file(path)
        return data

    @_errors_of_the_system()
    def check_filled(self, *names: str) -> None:
        """Raises DamagedCheckpoint if next to nothing of a large file is on the disk.

        What copied it may have made holes of zeros, and a file system may compress them.
        """
        if isinstance(self.fs, LocalFileSystem):
            status = os.stat(self.at(*names))
            held = 512 * getattr(status, "st_blocks", status.st_size)  # not on every system
            if status.st_size - held > _MOST_HOLES and held < status.st_size / 64:
                raise DamagedCheckpoint(
                    f"{status.st_size} bytes, of which the disk holds {held}: the others are holes"
                )

    @_errors_of_the_system()
    def size(self, *names: str) -> int:
        size: int = self._seen_now().size(self.at(*names))
        return size

    def bytes_in(self, name: str) -> int:
        """How many bytes a folder has, as far as the place tells."""
        with contextlib.suppress(OSError), _errors_of_the_system():
            size: int = self._seen_now().du(self.at(name))
            return size
        return 0

    @_errors_of_the_system()
    def written(self, *names: str) -> datetime.datetime:
        """When a file, or the last one in a folder, was written, by the place's own clock.

        Raises:
            FileNotFoundError: there is none.
            NotImplementedError: the place does not say.
        """
        path, times = self.at(*names), []
        for each in (path, *self._seen_now().find(path)):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                times.append(self.fs.modified(each))
        if not times:
            raise FileNotFoundError(path)
        last: datetime.datetime = max(times)
        return last

    @_errors_of_the_system()
    def holds(self, *names: str) -> bool:
        """Whether there is such a file or folder."""
        try:
            self._seen_now().info(self.at(*names))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


class _CountedFile:
    """A file of the folder, which counts the calls of its methods."""

    def __init__(self, file: Any, folder: Folder) -> None:
        self._file = file
        self._folder = folder

    def __getattr__(self, method: str) -> Any:
        self._folder.num_calls += 1
        return getattr(self._file, method)


def name_of(step: int, nonce: str) -> str:
    """The name of a save's folder.

    Args:
        step: the number of the batch that follows.
        nonce: another one for every save, of letters and digits.
    """
    return f"step-{step:08d}-{nonce}"


def run_of(name: str) -> str:
    """The run whose save made a folder of that name: what the nonces of all its saves begin with.

    Earlier versions named some folders without.
    """
    nonce = name.split("-")[2:]
    return nonce[0][:_RUN_LENGTH] if nonce else ""


def step_of(name: str) -> int:
    """The step in the name of a save's folder."""
    found = _SAVE.fullmatch(name)
    if found is None:
        raise ValueError(f"{name}: it must be the name of a save's folder, such as step-00000001-a")
    return int(found[1])
