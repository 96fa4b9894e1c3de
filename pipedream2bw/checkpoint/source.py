"""A checkpoint to read from: every byte that is used is compared with what was written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import DamagedCheckpoint
from ..model.checkpoint import Checkpoint
from ..optimizer.state_by_name import StateByName
from .encoding import decode
from .folder import INDEX, Folder
from .manifest import read_manifest, weights_index
from .snapshot import MODEL, OPTIMIZER, RANK, buffer_prefix
from .tensor_file import OTHER_SUM, Entry, read_header, read_tensor

EXTRA_STATE = "_extra_state"
"""The last part of the names under which a ``state_dict`` has what ``get_extra_state`` gave."""

_MISSING = (FileNotFoundError, IsADirectoryError)
"""There is no such file. Any other OSError may pass: a damaged checkpoint is set aside for ever."""

_HEADER_BYTES = 2**18
"""What is fetched of a file in an object store to read its header; every rank reads all headers."""


class Source:
    """A checkpoint to read from.

    Args:
        name: of its folder.

    Attributes:
        manifest: what it says.

    Raises:
        DamagedCheckpoint, ValueError: see :func:`read_manifest`.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder = folder
        self.name = name
        self.manifest = read_manifest(folder, name)
        self._headers: dict[str, dict[str, Entry]] = {}

    def check_file(self, file_name: str, *, sums: bool) -> None:
        """Raises DamagedCheckpoint if a file is not as it was written.

        Args:
            sums: whether all its bytes are read; otherwise its size and its header.
        """
        saved = self.manifest.files[file_name]
        with self._naming(file_name):
            size = self.folder.size(self.name, file_name)
            if size != saved.size:
                raise ValueError(f"{size} bytes, it was written with {saved.size}")
            self.folder.check_filled(self.name, file_name)
            if set(self._header(file_name)) != set(saved.tensors):
                raise ValueError("other tensors than were written")
        places = dict.fromkeys(saved.tensors, file_name)
        for _ in self._tensors(places, keep=False) if sums else ():
            pass

    @contextlib.contextmanager
    def _naming(self, file_name: str) -> Iterator[None]:
        """Names the file in what is raised inside where it is not as it was written."""
        try:
            yield
        except (*_MISSING, ValueError) as error:
            raise DamagedCheckpoint(f"{self.name}/{file_name}: {error}") from error

    def _header(self, file_name: str) -> dict[str, Entry]:
        if file_name not in self._headers:
            with self.folder.open(self.name, file_name, ahead=_HEADER_BYTES) as file:
                self._headers[file_name] = read_header(file, self.manifest.files[file_name])
        return self._headers[file_name]

    def places(self, kind: str, ranks: Collection[int] | None = None) -> dict[str, str]:
        """The files of a kind's tensors, by the tensors' names.

        Args:
            ranks: only what these have written.
        """
        return {
            name: file_name
            for file_name, saved in self.manifest.files.items()
            if saved.kind == kind and (ranks is None or saved.rank in ranks)
            for name in saved.tensors
        }

    def entry(self, name: str, file_name: str) -> Entry:
        return self._header(file_name)[name]

    def read(self, places: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Reads tensors.

        Args:
            places: their files, by their names.

        Raises:
            DamagedCheckpoint: a tensor's bytes are not those that were written.
        """
        return dict(self._tensors(places))

    def _tensors(
        self, places: Mapping[str, str], *, keep: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for file_name in dict.fromkeys(places.values()):
            with self._naming(file_name), self.folder.open(self.name, file_name) as file:
                for name in (n for n, place in places.items() if place == file_name):
                    tensor, crc = read_tensor(file, self.entry(name, file_name), keep=keep)
                    if crc != self.manifest.files[file_name].tensors[name]:
                        raise ValueError(f"{name}: {OTHER_SUM}")
                    yield name, tensor

    def weights(self) -> Checkpoint:
        """The newest weights, as the unsplit model's ``state_dict`` has them."""
        places, tied = self.places(MODEL), self.manifest.tied
        saved_as = {name: name for name in places} | {
            name: first for name, first in tied.items() if first in places
        }
        (kept,) = self.values(self.manifest.model_state)
        extra = {
            f"{module}.{EXTRA_STATE}" if module else EXTRA_STATE: value
            for module, value in kept.items()
        }

        def read(names: Sequence[str]) -> dict[str, Any]:
            tensors = self.read({saved_as[n]: places[saved_as[n]] for n in names if n in saved_as})
            return {n: tensors[saved_as[n]] if n in saved_as else extra[n] for n in names}

        return Checkpoint([*saved_as, *extra], read)

    def states(self, parameters: Collection[str] | None = None) -> StateByName:
        """What optimizers keep of some parameters, None: of all, by the names that were saved."""

        def is_asked_for(parameter: str) -> bool:
            return parameters is None or parameter in parameters

        (numbers,) = self.values(self.manifest.numbers)
        states: StateByName = {name: of for name, of in numbers.items() if is_asked_for(name)}
        places = self.places(OPTIMIZER)
        names = [name for name in places if is_asked_for(name.rpartition("/")[0])]
        for name, value in self.read({name: places[name] for name in names}).items():
            parameter, _, key = name.rpartition("/")
            states.setdefault(parameter, {})[key] = value
        return states

    def values(self, *documents: Any) -> list[Any]:
        """The user's state of which these are documents; its tensors are read."""
        files = self.places(RANK)
        names: list[str] = []
        for document in documents:
            _tensor_names(document, names)
        # What is missing is named by decode().
        tensors = self.read({name: files[name] for name in names if name in files})
        return [decode(document, tensors) for document in documents]


def _tensor_names(document: Any, names: list[str]) -> None:
    if isinstance(document, list):
        for item in document:
            _tensor_names(item, names)
    elif isinstance(document, dict):
        for key, item in document.items():
            if key in ("$tensor", "$array") and isinstance(item, str):
                names.append(item)
            else:
                _tensor_names(item, names)


def damage_of(folder: Folder, name: str, *, sums: bool) -> Iterator[str]:
    """Names each file, and with sums each tensor, that is not as it was written.

    Args:
        sums: whether every byte is read; otherwise the manifest, and of each file its size and its
            header.
    """
    try:
        source = Source(folder, name)
    except ValueError as error:  # also a manifest of another version, which cannot be compared
        yield str(error)
        return
    index = f"{name}/{INDEX}"
    try:
        if folder.read(name, INDEX) != weights_index(source.manifest.files):
            yield f"{index}: it does not say where the manifest's weights are"
    except DamagedCheckpoint as error:
        yield f"{index}: {error}"
    except _MISSING:
        yield f"{index}: there is no such file"
    for file_name, saved in source.manifest.files.items():
        try:
            source.check_file(file_name, sums=False)
        except DamagedCheckpoint as error:
            yield str(error)
            continue
        for tensor in saved.tensors if sums else ():
            try:
                source.read({tensor: file_name})
            except DamagedCheckpoint as error:
                yield str(error)


def num_parameters(source: Source) -> int:
    """Elements of the model's parameters; with its buffers if the weights were imported."""
    buffers = source.places(RANK)
    return sum(
        math.prod(source.entry(name, file_name).shape)
        for name, file_name in source.places(MODEL).items()
        if buffer_prefix(0) + name not in buffers
    )
