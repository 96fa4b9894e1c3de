"""A checkpoint made of weights that something else has saved."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..model.checkpoint import Checkpoint, open_checkpoint
from .commit import commit, remove, steps_in
from .cut import MODEL, RANK
from .encoding import encode
from .folder import Folder, name_of
from .manifest import Manifest, SavedFile
from .source import EXTRA_STATE
from .tensor_file import TENSORS, check_saveable, write_tensors

_READ_AT_ONCE = 16
_FILE_BYTES = 2**30


def import_weights(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, prefix: str = ""
) -> str:
    """Makes checkpoint 0 of a new run out of weights, which its ``resume()`` then begins with.

    Args:
        path: as in :meth:`PipelineModule.load_checkpoint`.
        out: a folder without checkpoints, or a URL that fsspec knows.
        prefix: only entries whose names begin with it, which is removed.

    Returns:
        The name of the checkpoint's folder in ``out``.

    Raises:
        ValueError, ImportError: ``path`` cannot be read; ``out`` has checkpoints.
        TypeError: an entry is no tensor.
    """
    entries = open_checkpoint(path, prefix)
    if not entries.names:
        raise ValueError(f"{os.fspath(path)}: no entry begins with {prefix!r}, there must be one")
    folder = Folder(out)
    if steps := steps_in(folder):
        raise ValueError(f"{folder.path}: {len(steps)} checkpoints, there must be none")
    nonce = secrets.token_hex(4)
    name = name_of(0, nonce)
    folder.make(name)
    try:
        extra: dict[str, Any] = {}
        files: dict[str, SavedFile] = {}
        for number, tensors in enumerate(_lots(entries, extra)):
            files |= _write(folder, name, f"{MODEL}-{number + 1:05d}", MODEL, tensors)
        of_modules: dict[str, torch.Tensor] = {}
        model_state = encode(extra, "model_state", of_modules)
        if of_modules:
            files |= _write(folder, name, f"{RANK}-00001", RANK, of_modules)
        manifest = Manifest(nonce=nonce, batch=0, model_state=model_state, files=files)
        commit(folder, name, manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(folder, name)
        raise
    return name


def _lots(entries: Checkpoint, extra: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one file after the other; puts what modules keep beside into ``extra``."""
    names = list(entries.names)
    lot: dict[str, torch.Tensor] = {}
    for first in range(0, len(names), _READ_AT_ONCE):
        for name, value in entries.read(names[first : first + _READ_AT_ONCE]).items():
            module, _, last = name.rpartition(".")
            if last == EXTRA_STATE:
                extra[module] = value
                continue
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{name}: {type(value).__name__}, it must be a tensor: weights alone are "
                    "imported; a prefix leaves out the rest"
                )
            check_saveable(name, value)
            lot[name] = value
        if sum(tensor.nbytes for tensor in lot.values()) >= _FILE_BYTES:
            yield lot
            lot = {}
    if lot:
        yield lot


def _write(
    folder: Folder, name: str, stem: str, kind: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, SavedFile]:
    file_name = f"{stem}{TENSORS}"
    with folder.writing(name, file_name) as file:
        written = write_tensors(file, tensors)
    return {file_name: SavedFile(kind=kind, rank=0, **written._asdict())}
