"""A checkpoint in formats of others: Hugging Face's, ``torch.save``'s, torch.distributed's."""

from __future__ import annotations

import os
import warnings
from typing import Any

import fsspec
import torch

from ..optimizer.cut import SavedOptimizers, is_of
from .cut import MODEL, OPTIMIZER
from .folder import INDEX, Folder
from .manifest import SavedFile, weights_index
from .source import Source
from .tensor_file import write_tensors


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
    _FORMATS[to](source, os.fspath(out))


def _to_hugging_face(source: Source, out: str) -> None:
    folder = Folder(out)
    folder.make()
    files = {n: file for n, file in source.manifest.files.items() if file.kind == MODEL}
    written: dict[str, SavedFile] = {}
    for name, saved in files.items():
        tensors = source.read(dict.fromkeys(saved.tensors, name))
        with folder.writing(name) as file:
            new = write_tensors(file, tensors)
        written[name] = SavedFile(kind=MODEL, rank=saved.rank, **new._asdict())
    folder.write(INDEX, data=weights_index(written))


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
    manifest, places = source.manifest, source.places(OPTIMIZER)
    shared, numbers = source.values(manifest.optimizer, manifest.numbers)
    beside = SavedOptimizers.of(shared).of_all_extensions
    state: dict[str, dict[str, Any]] = {}
    for name, value in source.read(places).items():
        parameter, _, key = name.rpartition("/")
        if not is_of(key, beside):
            state.setdefault(parameter, {})[key] = value
    for parameter, values in numbers.items():
        own = {key: value for key, value in values.items() if not is_of(key, beside)}
        state.setdefault(parameter, {}).update(own)
    groups = {
        name: dict(options)
        for optimizer in shared["optimizers"]
        for options, names in zip(optimizer["groups"], optimizer["members"], strict=True)
        for name in names
    }
    return {"state": state, "param_groups": groups}


_FORMATS = {"hf": _to_hugging_face, "torch": _to_torch, "dcp": _to_torch_distributed}

EXPORT_FORMATS = tuple(_FORMATS)
"""What :func:`export` writes."""
