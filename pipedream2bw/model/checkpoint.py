"""Checkpoints in files, of which only what is asked for is read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_NAMES_IN_A_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The entries of a ``state_dict`` that is somewhere.

    Attributes:
        names: of all entries.
        take: reads the entries of these names.
    """

    names: Collection[str]
    take: Callable[[Sequence[str]], dict[str, Any]]

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Checkpoint:
        """Of a mapping, which may read when it is asked."""
        return Checkpoint(
            state_dict.keys(), lambda names: {name: state_dict[name] for name in names}
        )

    def under(self, prefix: str) -> Checkpoint:
        """The entries whose names begin with ``prefix``, which they lose."""
        if not prefix:
            return self
        names = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]

        def take(wanted: Sequence[str]) -> dict[str, Any]:
            taken = self.take([prefix + name for name in wanted])
            return {name: taken[prefix + name] for name in wanted}

        return Checkpoint(names, take)


def open_checkpoint(path: str | os.PathLike[str], prefix: str = "") -> Checkpoint:
    """The entries of a checkpoint on disk, see :meth:`PipelineModule.load_checkpoint`."""
    place = Path(path)
    if not place.exists():
        raise ValueError(f"checkpoint: {place} does not exist, it must be a file or a folder")
    try:
        return _open(place).under(prefix)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"checkpoint {place} cannot be read: {error}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        if (path / ".metadata").exists():
            return _of_torch_distributed(path)
        for name in _NAMES_IN_A_FOLDER:
            if (path / name).exists():
                return _open(path / name)
        raise ValueError(
            f"checkpoint: the folder {path} has none of {', '.join(_NAMES_IN_A_FOLDER)} and no "
            ".metadata of torch.distributed.checkpoint"
        )
    if path.suffix == ".json":
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return _of_files({name: path.parent / file for name, file in places.items()})
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as file:
            return _of_files(dict.fromkeys(file.keys(), path))
    entries = _read_torch_file(path)
    return Checkpoint.of(entries)


def _of_files(places: Mapping[str, Path]) -> Checkpoint:
    """Entries in files that are only opened for them."""

    def take(names: Sequence[str]) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        for path in dict.fromkeys(places[name] for name in names):
            here = [name for name in names if places[name] == path]
            if path.suffix == ".safetensors":
                with _open_safetensors(path) as file:
                    taken.update((name, file.get_tensor(name)) for name in here)
            else:
                entries = _read_torch_file(path)
                taken.update((name, entries[name]) for name in here)
        return taken

    return Checkpoint(places.keys(), take)


def _open_safetensors(path: Path) -> contextlib.AbstractContextManager[Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"checkpoint {path}: safetensors is not installed: "
            "pip install 'pipedream2bw[safetensors]'"
        ) from error
    opened: contextlib.AbstractContextManager[Any] = safe_open(path, framework="pt", device="cpu")
    return opened


def _read_torch_file(path: Path) -> dict[str, Any]:
    """The file mapped into memory, of which only the tensors that are used are read."""
    return _flat(torch.load(path, map_location="cpu", mmap=True, weights_only=True))


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _of_torch_distributed(path: Path) -> Checkpoint:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    described = FileSystemReader(path).read_metadata().state_dict_metadata

    def take(names: Sequence[str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name in names:
            about = described[name]
            state[name] = None
            if isinstance(about, TensorStorageMetadata):
                state[name] = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not ask the other processes
            load(state, storage_reader=FileSystemReader(path), no_dist=True)
        return state

    return Checkpoint(described.keys(), take)
