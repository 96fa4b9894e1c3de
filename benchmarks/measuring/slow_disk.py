"""One slow disk for all checkpoints that the processes of a machine write."""

from __future__ import annotations

import contextlib
import fcntl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pipedream2bw.checkpoint.folder import Folder

_FORMAT = "dd"  # bytes a second, and when the disk is free again (of the monotonic clock)


class SlowDisk:
    """A disk that writes so many bytes a second, whoever writes them, one piece after the other.

    The processes share it through a small file: it holds the time at which everything that was
    given to the disk is written. Who writes puts the time of its own bytes on top, and waits until
    then.

    Args:
        clock: the file, the same in all processes.
    """

    def __init__(self, clock: Path) -> None:
        self._clock = clock
        self._clock.touch()

    def set_speed(self, bytes_per_second: float) -> None:
        """Also says so again what it is already; whatever waits goes on as it would have."""
        self._give(0, bytes_per_second)

    def write(self, size: int) -> None:
        """Returns when the disk has written so many bytes."""
        done = self._give(size)
        time.sleep(max(0.0, done - time.monotonic()))

    def _give(self, size: int, speed: float | None = None) -> float:
        """When the disk will have written these bytes, and all that it was given before."""
        with self._clock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # also among threads: the file is opened anew
            held = file.read(struct.calcsize(_FORMAT))
            old_speed, free = struct.unpack(_FORMAT, held) if held else (0.0, 0.0)
            speed = speed or old_speed
            done: float = max(free, time.monotonic()) + (size / speed if size else 0.0)
            file.seek(0)
            file.write(struct.pack(_FORMAT, speed, done))
        return done


@contextlib.contextmanager
def checkpoints_on(disk: SlowDisk) -> Iterator[None]:
    """Makes every write to a checkpoint in this process take as long as on that disk."""
    writing = Folder.writing

    @contextlib.contextmanager
    def slowly(self: Folder, *names: str) -> Iterator[IO[bytes]]:
        with writing(self, *names) as file:

            class Slow:
                def write(self, data: Any) -> int:
                    disk.write(len(data))
                    return file.write(data)

            yield Slow()  # type: ignore[misc]

    Folder.writing = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        Folder.writing = writing  # type: ignore[method-assign]
