"""How a save's folder becomes a checkpoint, and how it goes: the one protocol of all places.

Every save writes a folder of its own, ``step-<batch>-<nonce>``, in which nothing is renamed or
replaced. Each rank writes its files of tensors, and then its part of the manifest. Rank 0 puts the
parts together, writes the index of the weights, and the manifest last: with it the folder is a
checkpoint. Then the parts go. Who removes a checkpoint removes its manifest first.

So a kill at any moment leaves a checkpoint or a folder that is none. A folder with a manifest that
is not whole tells by the parts beside it: with them, the save ended while the manifest was written;
without them, the checkpoint has been damaged since.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import re
import secrets
import warnings
from collections.abc import Collection
from typing import NamedTuple

from .folder import INDEX, MANIFEST, Folder, run_of, step_of
from .manifest import Manifest, read_manifest, weights_index
from .source import Source

log = logging.getLogger("pipedream2bw")

CORRUPT, ABANDONED = "corrupt", "abandoned"
"""Empty files: with one of them a checkpoint is set aside, so that nobody takes it."""

_FAILED = re.compile(r"failed-\d{5,}(\.json)?")
_PARTS = re.compile(rf"part-\d{{5,}}\.json|{_FAILED.pattern}")
_NOW = ".now"


def part_name(rank: int) -> str:
    """The file in which a rank tells rank 0 what it has written."""
    return f"part-{rank:05d}.json"


def failed_name(rank: int, *, has_room: bool = True) -> str:
    """The file in which a rank tells the others why its part, or the manifest, will not come.

    Args:
        has_room: for the reason; otherwise the file is empty.
    """
    return f"failed-{rank:05d}{'.json' if has_room else ''}"


class Saves(NamedTuple):
    """What saves have made in a folder.

    Attributes:
        checkpoints: newest first. Of one batch the one that became whole last is the newest.
        others: folders of saves that have not ended, or never will; and of removals.
    """

    checkpoints: list[str]
    others: list[str]


def look(folder: Folder, step: int | None = None) -> Saves:
    """Looks which folders of saves, of one batch or of all, are checkpoints."""
    found = Saves([], [])
    for name in folder.saves():
        if step is not None and step != step_of(name):
            continue
        names = folder.names(name)
        if name in names or not names.isdisjoint((CORRUPT, ABANDONED)):  # a file; set aside
            continue
        is_checkpoint = MANIFEST in names and (
            not any(map(_PARTS.fullmatch, names)) or _saved_before(folder, name) >= 0
        )
        (found.checkpoints if is_checkpoint else found.others).append(name)
    count = collections.Counter(map(step_of, found.checkpoints))

    def age(name: str) -> tuple[int, int, str]:
        step = step_of(name)
        return step, _saved_before(folder, name) if count[step] > 1 else 0, name

    found.checkpoints.sort(key=age, reverse=True)
    return found


def _saved_before(folder: Folder, name: str) -> int:
    """The count in a manifest; of one that is not whole -1, as that is older than any other."""
    try:
        return read_manifest(folder, name).saved_before
    except ValueError:
        return -1


def steps_in(folder: Folder) -> list[int]:
    """The batches of which there are checkpoints, newest first."""
    return list(dict.fromkeys(map(step_of, look(folder).checkpoints)))


def checkpoints(folder: Folder, step: int | None = None) -> list[str]:
    """The names of the checkpoints, or of those of one batch, newest first.

    Raises:
        ValueError: there is none.
    """
    names = look(folder).checkpoints
    if not names:
        raise ValueError(
            f"{folder.path}: no checkpoint, or no such folder. Give a folder that a Checkpointer "
            "or pd2.save() has written to"
        )
    of_step = [name for name in names if step in (None, step_of(name))]
    if not of_step:
        known = ", ".join(map(str, dict.fromkeys(map(step_of, names))))
        raise ValueError(f"{folder.path}: no checkpoint {step}, there are {known}")
    return of_step


def is_whole(folder: Folder, name: str) -> bool:
    """Whether a save's manifest is there as a whole, as far as it can be read."""
    with contextlib.suppress(OSError):
        return _saved_before(folder, name) >= 0
    return False


def commit(
    folder: Folder, name: str, manifest: Manifest, runs: Collection[str] | None = None
) -> None:
    """Makes a save's folder a checkpoint, when all its files of tensors are on the disk.

    Rank 0 alone. An earlier checkpoint of the batch is removed.

    Args:
        runs: whose checkpoints may be removed; None: any.

    Raises:
        OSError: a file cannot be written, or has been removed; the folder may be a checkpoint if
            its manifest is whole.
    """
    earlier = look(folder, manifest.batch).checkpoints
    number = 1 + max((_saved_before(folder, each) for each in earlier), default=-1)
    folder.write(name, INDEX, data=weights_index(manifest.files))
    folder.sync(name)
    names = folder.names(name)
    if gone := sorted(manifest.files.keys() - names):
        raise OSError(f"{name}: {gone[0]} is gone, which this save has written")
    whole = dataclasses.replace(manifest, saved_before=number)
    folder.write(name, MANIFEST, data=whole.to_json().encode())
    folder.sync(name)
    folder.sync()
    with contextlib.suppress(OSError):  # it is whole
        for each in filter(_PARTS.fullmatch, names):
            folder.remove(name, each)
        for each in earlier:
            if runs is None or run_of(each) in runs:
                remove(folder, each)


def remove(folder: Folder, name: str) -> None:
    """Removes a save's folder; from its first moment on it is no checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        folder.remove(name, MANIFEST)
        folder.sync(name)
    with contextlib.suppress(FileNotFoundError):
        folder.remove(name)


def set_aside(folder: Folder, name: str, why: str) -> None:
    """Marks a checkpoint as corrupt or abandoned, so that nobody takes it; all of it stays."""
    folder.write_nothing(name, why)
    folder.sync(name)


def clean(folder: Folder, seconds: float, *, but: str) -> None:
    """Removes what dead saves and removals have left. Never raises.

    A save is dead if one of its ranks has failed, or if nothing has come to its folder for some
    time. That is measured by the clock of the place alone: between the last file there and one that
    is written now.

    Args:
        seconds: how long a save may write nothing and yet live.
        but: the folder of the save that begins.
    """
    try:
        others = [name for name in look(folder).others if name != but]
        if not others:
            return
        folder.write_nothing(_NOW)
        now = folder.written(_NOW)
        folder.remove(_NOW)
        for name in others:
            with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                has_failed = any(map(_FAILED.fullmatch, folder.names(name)))
                if has_failed or (now - folder.written(name)).total_seconds() > seconds:
                    remove(folder, name)
                    log.info("%s: removed %s, which a save left unfinished", folder.path, name)
    except Exception as error:  # saving goes on
        log.warning("%s: what dead saves have left was not removed: %s", folder.path, error)


def tried(folder: Folder) -> list[str]:
    """Makes the folder, and a file in it that it removes; gives the checkpoints that are there.

    A folder that is there and cannot be written is a warning: a run may go on from what it has.

    Raises:
        OSError: there is no folder, and none can be made.
    """
    cannot = f"{folder.path}: no checkpoint can be written there"
    try:
        folder.make()
    except OSError as error:
        raise OSError(f"{cannot}: {error}") from error
    try:
        name = f".tried-{secrets.token_hex(4)}"
        folder.write(name, data=b"")
        folder.remove(name)
    except OSError as error:
        warnings.warn(f"{cannot} now: {error}", stacklevel=2)
    return look(folder).checkpoints


def retain(
    folder: Folder, keep: int, keep_every: int | None, runs: Collection[str], found: list[str]
) -> None:
    """Removes checkpoints that need not stay, if the newest is whole. Never raises.

    Where another run saves to the folder, all stay.

    Args:
        runs: this one, and those that it went on from.
        found: gets the names of another run's checkpoints.
        keep: how many of the newest stay.
        keep_every: the first one of every so many batches stays, too.
    """
    try:
        names = look(folder).checkpoints
        found[:] = [name for name in names if run_of(name) not in runs]
        if found:
            return
        source = Source(folder, names[0])
        for file_name in source.manifest.files:
            source.check_file(file_name, sums=False)
        of_step = {step_of(name): name for name in reversed(names)}  # the newest of each batch
        kept, before = set[str](), 0
        for number, step in enumerate(sorted(of_step)):
            is_new = number >= len(of_step) - keep
            if is_new or (keep_every is not None and step // keep_every > before // keep_every):
                kept.add(of_step[step])
                before = step
        for name in names:
            if name not in kept:
                remove(folder, name)
    except Exception as error:  # the new checkpoint is whole
        log.warning("%s: older checkpoints were not removed: %s", folder.path, error)
