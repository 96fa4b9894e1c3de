"""What is in a folder of checkpoints, and what of it is damaged."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import DamagedCheckpoint
from .cut import MODEL, buffer_prefix
from .folder import INDEX, Folder
from .manifest import read_manifest, weights_index
from .source import Source


def damage_of(folder: Folder, step: int, *, sums: bool) -> Iterator[str]:
    """Names each file, and with sums each tensor, that is not as it was written.

    Args:
        sums: whether every byte is read; otherwise the manifest, and of each file its size and its
            header.
    """
    try:
        source = Source(folder, read_manifest(folder, step))
    except ValueError as error:  # also a manifest of another version, which cannot be compared
        yield str(error)
        return
    index = f"{source.name}/{INDEX}"
    try:
        is_other = folder.read(source.name, INDEX) != weights_index(source.manifest.files)
        # In between it is the former one, whose files are still there; resume() exchanges it.
        if is_other and not folder.is_replaced_by(step, source.manifest.nonce):
            yield f"{index}: it does not say where the manifest's weights are"
    except (FileNotFoundError, IsADirectoryError):
        yield f"{index}: there is no such file"
    for name in source.manifest.files:
        try:
            source.check_file(name, sums=False)
        except DamagedCheckpoint as error:
            yield str(error)
            continue
        if sums:
            yield from _damaged_tensors(source, name)


def _damaged_tensors(source: Source, file_name: str) -> Iterator[str]:
    for tensor in source.manifest.files[file_name].tensors:
        try:
            source.read({tensor: file_name})
        except DamagedCheckpoint as error:
            yield str(error)


def num_parameters(source: Source) -> int:
    """Elements of the model's parameters; with its buffers if the weights were imported."""
    buffers = source.places("rank")
    return sum(
        math.prod(source.entry(name, file_name).shape)
        for name, file_name in source.places(MODEL).items()
        if buffer_prefix(0) + name not in buffers
    )
