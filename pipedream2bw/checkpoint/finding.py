"""Loads the newest checkpoint that is whole, the same on all ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import DamagedCheckpoint
from ..runtime.session import Session
from .folder import MANIFEST, Folder, name_of
from .inspecting import damage_of
from .manifest import read_manifest
from .source import Source
from .waiting import on_all_ranks, on_first_rank

_Loaded = TypeVar("_Loaded")

log = logging.getLogger("pipedream2bw")

_VISIBLE_SECONDS = 60.0
"""A network file system may show a folder to other machines as it was so long ago."""
_READS = 3
"""Attempts to read, a second apart: what a network says now it may not say then."""


def load_whole(
    session: Session,
    folder: Folder,
    step: int | None,
    load: Callable[[Source], _Loaded],
    *,
    known_everywhere: Callable[[list[int]], list[int]] = list,
) -> _Loaded | None:
    """Loads the newest checkpoint that is whole; None if there are no checkpoints.

    Newer ones are renamed: ``.corrupt`` if they are damaged or cannot be read, ``.abandoned`` if
    an older one was asked for. If none is whole, all of them stay as they are. Every rank calls it.

    Args:
        step: the only one that may be taken; None: any.
        load: raises DamagedCheckpoint on every rank, and has changed nothing then, where a sum is
            wrong that only who reads all of a file's tensors compares.
        known_everywhere: of checkpoints those that other sites have, too. Rank 0 calls it.

    Raises:
        DamagedCheckpoint: there are checkpoints, and none is whole.
        ValueError: a rank does not see what rank 0 sees; another version wrote it; there is no
            such step.
        TimeoutError: the file system hangs.
    """
    there = on_first_rank(session, folder, "looking for checkpoints", folder.steps)
    with session.ending.lost_ranks_close():
        steps: list[int] = session.control.from_first(
            lambda: _candidates(folder, known_everywhere(there), step)
        )
    damage: dict[int, str] = {}
    for candidate in steps:
        look = _Look(session, folder, candidate)
        reading = f"reading {name_of(candidate)}"
        source, found = on_all_ranks(session, folder, reading, look)
        everyone = session.gather(found)
        decide = functools.partial(look.decide, everyone)
        wrong = on_first_rank(session, folder, reading, decide)
        if wrong is None:
            assert source is not None
            try:
                loaded = load(source)
            except DamagedCheckpoint as error:
                wrong = str(error)
            else:
                rename = functools.partial(_set_aside_newer, folder, candidate, damage)
                on_first_rank(session, folder, "renaming newer checkpoints", rename)
                return loaded
        damage[candidate] = wrong
        log.warning("%s: the next older checkpoint is taken", wrong)
    if steps:
        texts = "; ".join(damage.values())
        raise DamagedCheckpoint(
            f"{folder.path}: none of {len(steps)} checkpoints is whole: {texts}"
        )
    return None


def _candidates(folder: Folder, steps: list[int], step: int | None) -> list[int]:
    if step is not None and step not in steps:
        raise ValueError(f"step: {step}, {folder.path} has {steps or 'none'}")
    return steps if step is None else [step]


class _Look:
    """Looks at one checkpoint. Each rank reads some of the files to compare their sums."""

    def __init__(self, session: Session, folder: Folder, step: int) -> None:
        self._folder = folder
        self._step = step
        self._rank = session.grid.rank
        self._num_ranks = session.control.size

    def __call__(self) -> tuple[Source | None, str | None]:
        """The checkpoint, and what this rank finds wrong with it."""
        found = ""
        for read in range(_READS):
            if read > 0:
                time.sleep(1.0)
            try:
                self._wait_until_visible()
                source = Source(self._folder, read_manifest(self._folder, self._step))
                for number, name in enumerate(sorted(source.manifest.files)):
                    source.check_file(name, sums=number % self._num_ranks == self._rank)
                return source, None
            except DamagedCheckpoint as error:
                return None, str(error)
            except OSError as error:
                found = f"{name_of(self._step)}: {type(error).__name__}: {error}"
        return None, found

    def _wait_until_visible(self) -> None:
        begin, name = time.monotonic(), name_of(self._step)
        # The folder of a checkpoint appears with its manifest in it, but for object stores.
        sign = (name,) if self._folder.is_local else (name, MANIFEST)
        while self._rank != 0 and not self._folder.holds(*sign):
            if time.monotonic() - begin > _VISIBLE_SECONDS:
                raise ValueError(
                    f"{self._folder.path}: rank 0 sees {name}, rank {self._rank} does not: it "
                    "must be one folder for all processes"
                )
            time.sleep(0.5)

    def decide(self, found: list[str | None]) -> str | None:
        """What is wrong with the checkpoint. On rank 0, with what each rank has found."""
        if found[0] is not None:
            return found[0]
        for rank, text in enumerate(found):
            if text is not None:  # a rank may have read another folder
                try:
                    mine = next(damage_of(self._folder, self._step, sums=True), None)
                except OSError as error:
                    mine = str(error)
                if mine is None:
                    raise ValueError(
                        f"{self._folder.path}: rank {rank} reads {text}; rank 0 reads a whole "
                        "checkpoint: it must be one folder for all processes"
                    )
                return mine
        return None


def _set_aside_newer(folder: Folder, taken: int, damage: Mapping[int, str]) -> None:
    for step in folder.steps():
        if step > taken:
            try:
                name = folder.set_aside(step, "corrupt" if step in damage else "abandoned")
                log.warning("checkpoint %d is %s now", step, name)
            except OSError as error:
                log.warning("checkpoint %d could not be renamed: %s", step, error)
