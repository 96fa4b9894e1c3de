"""Loads the newest checkpoint that is whole, the same on all ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..errors import DamagedCheckpoint
from ..runtime.session import Session
from .commit import ABANDONED, CORRUPT, look, set_aside
from .folder import MANIFEST, Folder, step_of
from .source import Source, damage_of
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

    Newer ones are set aside: as corrupt if they are damaged or cannot be read, as abandoned if an
    older one was asked for. If none is whole, all of them stay as they are. Every rank calls it.

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
    action = "looking for checkpoints"
    there = on_first_rank(session, folder, action, lambda: look(folder).checkpoints)
    with session.ending.lost_ranks_close():
        names: list[str] = session.control.from_first(
            lambda: _candidates(folder, there, known_everywhere, step)
        )
    damage: dict[str, str] = {}
    for candidate in names:
        check = _Check(session, folder, candidate)
        reading = f"reading {candidate}"
        source, found = on_all_ranks(session, folder, reading, check)
        everyone = session.gather(found)
        decide = functools.partial(check.decide, everyone)
        wrong = on_first_rank(session, folder, reading, decide)
        if wrong is None:
            assert source is not None
            try:
                loaded = load(source)
            except DamagedCheckpoint as error:
                wrong = str(error)
            else:
                newer = there[: there.index(candidate)]
                leave = functools.partial(_set_aside, folder, newer, damage)
                on_first_rank(session, folder, "setting newer checkpoints aside", leave)
                return loaded
        damage[candidate] = wrong
        log.warning("%s: the next older checkpoint is taken", wrong)
    if names:
        texts = "; ".join(damage.values())
        raise DamagedCheckpoint(
            f"{folder.path}: none of {len(names)} checkpoints is whole: {texts}"
        )
    return None


def _candidates(
    folder: Folder,
    names: list[str],
    known_everywhere: Callable[[list[int]], list[int]],
    step: int | None,
) -> list[str]:
    steps = known_everywhere(list(dict.fromkeys(map(step_of, names))))
    if step is not None and step not in steps:
        raise ValueError(f"step: {step}, {folder.path} has {steps or 'none'}")
    return [name for name in names if step_of(name) in (steps if step is None else [step])]


class _Check:
    """Checks one checkpoint. Each rank reads some of the files to compare their sums."""

    def __init__(self, session: Session, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
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
                source = Source(self._folder, self._name)
                for number, name in enumerate(sorted(source.manifest.files)):
                    source.check_file(name, sums=number % self._num_ranks == self._rank)
                return source, None
            except DamagedCheckpoint as error:
                return None, str(error)
            except OSError as error:
                found = f"{self._name}: {type(error).__name__}: {error}"
        return None, found

    def _wait_until_visible(self) -> None:
        begin = time.monotonic()
        while self._rank != 0 and not self._folder.holds(self._name, MANIFEST):
            if time.monotonic() - begin > _VISIBLE_SECONDS:
                raise ValueError(
                    f"{self._folder.path}: rank 0 sees {self._name}, rank {self._rank} does not: "
                    "it must be one folder for all processes"
                )
            time.sleep(0.5)

    def decide(self, found: list[str | None]) -> str | None:
        """What is wrong with the checkpoint. On rank 0, with what each rank has found."""
        if found[0] is not None:
            return found[0]
        for rank, text in enumerate(found):
            if text is not None:  # a rank may have read another folder
                try:
                    mine = next(damage_of(self._folder, self._name, sums=True), None)
                except OSError as error:
                    mine = str(error)
                if mine is None:
                    raise ValueError(
                        f"{self._folder.path}: rank {rank} reads {text}; rank 0 reads a whole "
                        "checkpoint: it must be one folder for all processes"
                    )
                return mine
        return None


def _set_aside(folder: Folder, newer: Sequence[str], damage: Mapping[str, str]) -> None:
    for name in newer:
        why = CORRUPT if name in damage else ABANDONED
        try:
            set_aside(folder, name, why)
            log.warning("checkpoint %s is set aside as %s", name, why)
        except OSError as error:
            log.warning("checkpoint %s could not be set aside: %s", name, error)
