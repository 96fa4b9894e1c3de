"""Where checkpoints are: a folder of this machine, or any place that fsspec knows.

Each checkpoint is a folder in it, ``step-00001000``, that is whole as soon as it has a manifest. In
a file system it is written under another name and renamed when everything is on the disk. An object
store knows no renaming: there the manifest is written last.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

MANIFEST = "checkpoint.json"

_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp-\w+")


class Folder:
    """A folder of checkpoints.

    Args:
        path: of this machine, or a URL such as ``s3://bucket/run`` (the package that fsspec needs
            for it has to be installed).

    Raises:
        ImportError, ValueError: fsspec cannot reach such a place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(os.fspath(path))
        self.path = os.fspath(path)
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def at(self, *names: str) -> str:
        """The path of a file or folder inside, as fsspec wants it."""
        return "/".join((self.root.rstrip("/"), *names))

    def steps(self) -> list[int]:
        """The checkpoints that have a manifest, newest first."""
        found = (_STEP.fullmatch(name) for name in self._names())
        steps = [int(match[1]) for match in found if match]
        whole = [step for step in steps if self.fs.exists(self.at(name_of(step), MANIFEST))]
        return sorted(whole, reverse=True)

    def _names(self) -> list[str]:
        self.fs.invalidate_cache(self.root)
        try:
            entries = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    # ------------------------------------------------------------------ writing

    def begin(self, step: int, nonce: str) -> str:
        """The name under which all ranks write a checkpoint; makes the folder.

        Args:
            nonce: the same on all ranks, another one for every save.
        """
        name = f"{name_of(step)}.tmp-{nonce}" if self.is_local else name_of(step)
        self.fs.makedirs(self.at(name), exist_ok=True)
        return name

    @contextlib.contextmanager
    def writing(self, *names: str) -> Iterator[IO[bytes]]:
        """Opens a file to write; at the end its bytes are on the disk."""
        if not self.is_local:
            with self.fs.open(self.at(*names), "wb") as remote:
                yield remote
            return
        with open(self.at(*names), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def commit(self, name: str, step: int, manifest: bytes) -> None:
        """Writes the manifest, which makes the checkpoint whole.

        One rank calls it, after all ranks' files are on the disk.
        """
        final = name_of(step)
        if self.is_local:
            with self.writing(name, MANIFEST) as file:
                file.write(manifest)
            _sync_folder(self.at(name))
            if self.fs.exists(self.at(final)):  # of the same step, by a run that went on from less
                self.set_aside(step, "replaced")
            os.rename(self.at(name), self.at(final))
            _sync_folder(self.root)
        else:
            with self.writing(final, MANIFEST) as file:
                file.write(manifest)

    def clean(self) -> None:
        """Removes what saves that were interrupted have left. While nothing is being saved."""
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                with contextlib.suppress(OSError):
                    self.fs.rm(self.at(name), recursive=True)

    def discard(self, name: str) -> None:
        """Removes what a save has written so far, as far as possible."""
        with contextlib.suppress(OSError):
            self.fs.rm(self.at(name), recursive=True)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, its manifest first: it is no checkpoint any more."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.at(name_of(step), MANIFEST))
            self.fs.rm(self.at(name_of(step)), recursive=True)

    def set_aside(self, step: int, suffix: str = "corrupt") -> str:
        """Renames a checkpoint so that nobody takes it; gives its new name."""
        name, number = f"{name_of(step)}.{suffix}", 1
        while self.fs.exists(self.at(name)):
            number += 1
            name = f"{name_of(step)}.{suffix}-{number}"
        self.fs.mv(self.at(name_of(step)), self.at(name), recursive=True)
        return name

    # ------------------------------------------------------------------ reading

    def open(self, *names: str) -> IO[Any]:
        """Opens a file to read its bytes."""
        file: IO[Any] = self.fs.open(self.at(*names), "rb")
        return file

    def read(self, *names: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        data: bytes = self.fs.cat_file(self.at(*names))
        return data

    def size(self, *names: str) -> int:
        """The size of a file."""
        self.fs.invalidate_cache(self.at(*names[:-1]))
        size: int = self.fs.size(self.at(*names))
        return size

    def bytes_in(self, name: str) -> int:
        """How many bytes a checkpoint has that is being written, as far as the place tells."""
        self.fs.invalidate_cache(self.at(name))
        with contextlib.suppress(OSError):
            size: int = self.fs.du(self.at(name))
            return size
        return 0

    def written(self, step: int) -> datetime.datetime | None:
        """When a checkpoint became whole; None if the place does not say."""
        try:
            time: datetime.datetime = self.fs.modified(self.at(name_of(step), MANIFEST))
        except NotImplementedError:
            return None
        return time.astimezone()

    def holds(self, *names: str) -> bool:
        """Whether there is such a file."""
        self.fs.invalidate_cache(self.at(*names[:-1]))
        exists: bool = self.fs.exists(self.at(*names))
        return exists


def name_of(step: int) -> str:
    """The folder's name of a checkpoint."""
    return f"step-{step:08d}"


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
