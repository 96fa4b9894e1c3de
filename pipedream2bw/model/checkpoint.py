"""Checkpoints in files, of which only the wanted entries are read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
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


PART = re.compile(r"@(\d+)-of-(\d+)/(.+)", re.DOTALL)
"""A name under which a process of a tensor-parallel stage saves its part of a tensor."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The entries of a ``state_dict`` in memory or in files.

    Attributes:
        names: the names of all entries.
        read: reads the entries of the given names.
    """

    names: Collection[str]
    read: Callable[[Sequence[str]], dict[str, Any]]

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Checkpoint:
        """Wraps a mapping, which may read an entry when it is asked for it."""
        return Checkpoint(
            state_dict.keys(), lambda names: {name: state_dict[name] for name in names}
        )

    def under(self, prefix: str) -> Checkpoint:
        """Keeps the entries whose names begin with ``prefix``, and removes it from these names."""
        if not prefix:
            return self
        names = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]

        def read(wanted: Sequence[str]) -> dict[str, Any]:
            entries = self.read([prefix + name for name in wanted])
            return {name: entries[prefix + name] for name in wanted}

        return Checkpoint(names, read)


def open_checkpoint(path: str | os.PathLike[str], prefix: str = "") -> Checkpoint:
    """Opens a checkpoint on disk, see :meth:`PipelineModule.load_checkpoint`."""
    place = Path(path)
    if not place.exists():
        raise ValueError(f"checkpoint: {place} does not exist, it must be a file or a folder")
    try:
        found = _open(place)
        if parts := [name for name in found.names if PART.fullmatch(name)]:
            raise ValueError(
                f"checkpoint {place}: {parts[0]} is one process's part of a tensor, entries must "
                "be whole: write whole ones by `pipedream2bw checkpoint export`, or go on with the "
                "run by pipedream2bw.load()"
            )
        return found.under(prefix)
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
    return Checkpoint.of(_read_torch_file(path))


def _of_files(places: Mapping[str, Path]) -> Checkpoint:
    """Reads from several files, each opened when an entry in it is wanted."""

    def read(names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in dict.fromkeys(places[name] for name in names):
            here = [name for name in names if places[name] == path]
            if path.suffix == ".safetensors":
                with _open_safetensors(path) as file:
                    found.update((name, file.get_tensor(name)) for name in here)
            else:
                entries = _read_torch_file(path)
                found.update((name, entries[name]) for name in here)
        return found

    return Checkpoint(places.keys(), read)


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
    """Maps a file into memory; tensors are read from it when they are used."""
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
    # Imported here because it takes a second.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    described = FileSystemReader(path).read_metadata().state_dict_metadata

    def read(names: Sequence[str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name in names:
            about = described[name]
            state[name] = None
            if isinstance(about, TensorStorageMetadata):
                state[name] = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about loading without the other processes
            load(state, storage_reader=FileSystemReader(path), no_dist=True)
        return state

    return Checkpoint(described.keys(), read)
