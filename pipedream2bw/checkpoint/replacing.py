"""Makes a checkpoint whole, also in the place of an earlier one of its step.

At every moment there is one whole checkpoint of the step, the former or the new one: files of
tensors have the save's nonce in their names if the step was saved before, and the manifest is
exchanged in one go. The index of the weights, which is for other programs, follows it; then the
former files go. What an interrupted save has not come to is done, or undone, by the next start.
"""

from __future__ import annotations

import contextlib
import re

from .cut import MODEL, OPTIMIZER, RANK
from .folder import INDEX, Folder, name_of
from .manifest import Manifest, read_manifest, to_bytes, weights_index

FAILED = "failed.json"


def part_name(rank: int) -> str:
    """The file in which a rank tells rank 0 what it has written."""
    return f"part-{rank:05d}.json"


_OURS = re.compile(
    rf"({MODEL}|older-\d+|{OPTIMIZER}|{RANK})-\d{{5}}(-of-\d{{5}}(-\w+)?)?\.safetensors"
    rf"|\.?part-\d{{5}}\.json|\.?{re.escape(FAILED)}|\.{re.escape(INDEX)}"
)
"""The names of the files that saves write, beside manifest and index."""


def commit(folder: Folder, name: str, manifest: Manifest) -> None:
    """Makes a checkpoint whole when all its files of tensors are on the disk. One rank alone.

    Args:
        name: under which it was written.
    """
    replaces, index = folder.is_whole(manifest.batch), weights_index(manifest.files)
    is_index_last = replaces and not folder.is_local
    if not is_index_last:
        folder.write(name, INDEX, data=index)
    folder.commit(name, manifest.batch, to_bytes(manifest))
    if is_index_last:
        folder.write(name, INDEX, data=index)
    if replaces:
        _remove_what_is_not_listed(folder, manifest)
    with contextlib.suppress(OSError):  # the checkpoint is whole
        folder.end_save(name)


def clean(folder: Folder) -> None:
    """Removes what saves that were interrupted have left. While nothing is being saved."""
    with contextlib.suppress(OSError):
        for save in folder.interrupted():
            replaces = folder.is_whole(save.step)
            if replaces:
                _settle(folder, save.step)
            folder.clear(save, replaces=replaces)


def _settle(folder: Folder, step: int) -> None:
    """Lets a checkpoint have its own files and index, whose replacement was interrupted."""
    try:
        manifest = read_manifest(folder, step)
    except ValueError:  # which is named when it is taken
        return
    index = weights_index(manifest.files)
    try:
        is_its_own = folder.read(name_of(step), INDEX) == index
    except FileNotFoundError:
        is_its_own = False
    if not is_its_own:
        folder.write(name_of(step), INDEX, data=index)
    _remove_what_is_not_listed(folder, manifest)


def _remove_what_is_not_listed(folder: Folder, manifest: Manifest) -> None:
    name = name_of(manifest.batch)
    for file_name in folder.names_in(name):
        if _OURS.fullmatch(file_name) and file_name not in manifest.files:
            folder.remove_file(name, file_name)
