"""What this process holds: threads, descriptors, groups, memory files and memory. Linux only."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from pathlib import Path

import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Resources:
    """Counts, but for ``resident``, which is bytes.

    Attributes:
        descriptors: without those of other processes: of each peer a board has one from the first
            wait on that takes long, whenever that comes.
    """

    threads: int
    descriptors: int
    memory_files: int
    groups: int
    resident: int

    def counts(self) -> tuple[int, ...]:
        return dataclasses.astuple(self)[:-1]

    def __str__(self) -> str:
        return (
            f"{self.threads} threads, {self.descriptors} descriptors, "
            f"{self.memory_files} memory files, {self.groups} groups, "
            f"{self.resident / 2**20:.1f} MiB"
        )


def resources() -> Resources:
    """What there is once the garbage is collected."""
    gc.collect()
    time.sleep(0.05)  # the system may show a thread a little longer than it is there
    own = Path("/proc/self")
    maps = (own / "maps").read_text(encoding="utf-8")
    return Resources(
        threads=len(list((own / "task").iterdir())),
        descriptors=sum(not _is_of_process(each) for each in (own / "fd").iterdir()),
        memory_files=sum("memfd:" in line or "/dev/shm" in line for line in maps.splitlines()),
        groups=len(dist.distributed_c10d._world.pg_map),
        resident=int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _is_of_process(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor) == "anon_inode:[pidfd]"
    except FileNotFoundError:  # the one by which the folder is read
        return False
