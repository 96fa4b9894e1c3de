"""Which checkpoints stay."""

from __future__ import annotations

import logging

from .folder import Folder
from .source import Source

log = logging.getLogger("pipedream2bw")


def retain(folder: Folder, keep: int, keep_every: int | None) -> None:
    """Removes checkpoints that need not stay, if the newest is whole. Never raises.

    Args:
        keep: how many of the newest stay.
        keep_every: the first one of every so many batches stays, too.
    """
    try:
        steps = folder.steps()
        newest = Source.newest(folder)
        for name in newest.manifest.files:
            newest.check_file(name, sums=False)
        kept = set(steps[:keep])
        every, before = keep_every, 0
        for step in sorted(steps):
            if step in kept or (every is not None and step // every > before // every):
                before = step
            else:
                folder.remove(step)
    except Exception as error:  # the new checkpoint is whole
        log.warning("%s: older checkpoints were not removed: %s", folder.path, error)
