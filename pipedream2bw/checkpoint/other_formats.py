"""Checkpoints in formats of others: Hugging Face's, ``torch.save``'s, torch.distributed's."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import fsspec
import torch

from ..model.checkpoint import Checkpoint, open_checkpoint
from ..optimizer.state_by_name import first_beside, is_of, of_extensions
from ..progress import progress
from .commit import commit, remove, steps_in
from .encoding import encode
from .folder import INDEX, Folder, name_of
from .manifest import Manifest, weights_index
from .snapshot import MODEL, RANK
from .source import EXTRA_STATE, Source
from .tensor_file import TENSORS, SavedFile, check_saveable, write_tensors

_READ_AT_ONCE = 16
_FILE_BYTES = 2**30


def export(source: Source, to: str, out: str | os.PathLike[str]) -> None:
    """Writes the newest weights of a checkpoint; every byte that is read is verified.

    Args:
        to: ``"hf"``: a folder of safetensors files with their index, a file at a time. ``"torch"``:
            one file that ``torch.load(weights_only=True)`` reads, the unsplit model's
            ``state_dict``. ``"dcp"``: a folder of ``torch.distributed.checkpoint`` with weights and
            moments, under names such as ``model.0.weight``, ``optimizer.state.0.weight.exp_avg``
            and ``optimizer.param_groups.0.weight.lr``.
        out: new; or a URL that fsspec knows.

    Raises:
        ValueError: another format; there is something at ``out``.
        DamagedCheckpoint: what is read is not what was written.
    """
    if to not in _FORMATS:
        raise ValueError(f"to: {to!r}, known: {', '.join(_FORMATS)}")
    fs, place = fsspec.core.url_to_fs(os.fspath(out))
    if fs.isfile(place) or (fs.isdir(place) and fs.ls(place)):
        raise ValueError(f"{os.fspath(out)}: it exists, nothing is overwritten")
    with progress(f"export to {os.fspath(out)}"):
        _FORMATS[to](source, os.fspath(out))


def _to_hugging_face(source: Source, out: str) -> None:
    folder = Folder(out)
    folder.make()
    places, files = source.places(MODEL), {}
    for file_name in dict.fromkeys(place[0] for place in places.values()):
        of_file = {name: place for name, place in places.items() if place[0] == file_name}
        with folder.writing(file_name) as file:
            files[file_name] = write_tensors(file, source.read(of_file))
    folder.write(INDEX, data=weights_index(files))


def _to_torch(source: Source, out: str) -> None:
    weights = source.weights()
    state = weights.read(list(weights.names))
    with fsspec.open(out, "wb") as file:
        torch.save(state, file)


def _to_torch_distributed(source: Source, out: str) -> None:
    # Imported here because it takes a second.
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = source.weights()
    state: dict[str, Any] = {"model": weights.read(list(weights.names))}
    if source.manifest.optimizer is not None:
        state["optimizer"] = _optimizer_state(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about saving without other processes
        save(state, checkpoint_id=out, no_dist=True)


def _optimizer_state(source: Source) -> dict[str, Any]:
    """By the parameters' names, as ``get_optimizer_state_dict`` has it when it flattens."""
    (shared,) = source.values(source.manifest.optimizer)
    extensions = of_extensions(shared)
    state = {
        parameter: {key: value for key, value in kept.items() if not is_of(key, extensions)}
        for parameter, kept in source.states().items()
    }
    groups = {
        name: dict(options)
        for optimizer in shared["optimizers"]
        for options, names in zip(
            first_beside(optimizer)["param_groups"], optimizer["members"], strict=True
        )
        for name in names
    }
    return {"state": state, "param_groups": groups}


_FORMATS = {"hf": _to_hugging_face, "torch": _to_torch, "dcp": _to_torch_distributed}

EXPORT_FORMATS = tuple(_FORMATS)
"""What :func:`export` writes."""


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
    files: dict[str, SavedFile] = {}

    def write(kind: str, number: int, tensors: dict[str, torch.Tensor]) -> None:
        file_name = f"{kind}-{number:05d}{TENSORS}"
        with folder.writing(name, file_name) as file:
            files[file_name] = write_tensors(file, tensors, kind)

    folder.make(name)
    try:
        extra: dict[str, Any] = {}
        for number, tensors in enumerate(_lots(entries, extra)):
            write(MODEL, number + 1, tensors)
        of_modules: dict[str, torch.Tensor] = {}
        model_state = encode(extra, "model_state", of_modules)
        if of_modules:
            write(RANK, 1, of_modules)
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
