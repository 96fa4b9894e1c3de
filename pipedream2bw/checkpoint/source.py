"""A checkpoint to read from: every byte that is used is compared with what was written."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import DamagedCheckpoint
from ..model.checkpoint import Checkpoint
from ..model.local_shards import Part
from ..optimizer.state_by_name import StateByName
from .encoding import decode
from .folder import INDEX, Folder
from .manifest import read_manifest, weights_index
from .parts import Place, files_of, part_of_these, split_name
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
            if set(self.header(file_name)) != set(saved.tensors):
                raise ValueError("other tensors than were written")
        files = dict.fromkeys(saved.tensors, file_name)
        for _ in self._tensors(files, keep=False) if sums else ():
            pass

    def check_tensor(self, name: str, file_name: str) -> None:
        """Raises DamagedCheckpoint if a tensor's bytes are not those that were written."""
        for _ in self._tensors({name: file_name}, keep=False):
            pass

    @contextlib.contextmanager
    def _naming(self, file_name: str) -> Iterator[None]:
        """Names the file in what is raised inside where it is not as it was written."""
        try:
            yield
        except (*_MISSING, ValueError) as error:
            raise DamagedCheckpoint(f"{self.name}/{file_name}: {error}") from error

    def header(self, file_name: str) -> dict[str, Entry]:
        """What a file says of its tensors, by their names there."""
        if file_name not in self._headers:
            with self.folder.open(self.name, file_name, ahead=_HEADER_BYTES) as file:
                self._headers[file_name] = read_header(file, self.manifest.files[file_name])
        return self._headers[file_name]

    def places(self, kind: str, ranks: Collection[int] | None = None) -> dict[str, Place]:
        """Where a kind's tensors are, by the tensors' names.

        Args:
            ranks: only what these have written.

        Raises:
            DamagedCheckpoint: a part of one is nowhere.
        """
        found: dict[str, dict[int, str]] = {}
        numbers: dict[str, int] = {}
        for file_name, saved in self.manifest.files.items():
            if saved.kind == kind and (ranks is None or saved.rank in ranks):
                for key in saved.tensors:
                    name, number, numbers[name] = split_name(key)
                    found.setdefault(name, {})[number] = file_name
        for name, parts in found.items():
            if sorted(parts) != list(range(numbers[name])):
                raise DamagedCheckpoint(
                    f"{self.name}: parts {sorted(parts)} of {name}, there must be {numbers[name]}"
                )
        return {name: tuple(parts[i] for i in sorted(parts)) for name, parts in found.items()}

    def entry(self, name: str, place: Place) -> Entry:
        """What the header says of a tensor; the shape is the whole one's."""
        (key, file_name), *_ = files_of(name, place, None).items()
        entry = self.header(file_name)[key]
        if len(place) == 1:
            return entry
        part = Part(self._cut(name, place), len(place), 0)
        return entry._replace(shape=part.whole_shape(entry.shape))

    def read(
        self, places: Mapping[str, Place], parts: Mapping[str, Part] | None = None
    ) -> dict[str, torch.Tensor]:
        """Reads tensors.

        Args:
            places: where they are, by their names.
            parts: of which only these parts are wanted.

        Raises:
            DamagedCheckpoint: a tensor's bytes are not those that were written.
            ValueError: what an optimizer kept of other parts cannot be put together.
        """
        parts = parts or {}
        files = {
            name: files_of(name, place, parts.get(name), self._cut(name, place))
            for name, place in places.items()
        }
        read = dict(
            self._tensors({k: file for of_one in files.values() for k, file in of_one.items()})
        )

        def wanted(name: str, place: Place) -> torch.Tensor:
            tensors, part = [read[key] for key in files[name]], parts.get(name)
            if len(tensors) < len(place) or (len(place) == 1 and part is None):  # it is ready
                return tensors[0]
            return part_of_these(name, tensors, self._cut(name, place), self._shape_of(name), part)

        return {name: wanted(name, place) for name, place in places.items()}

    def _parameter(self, name: str) -> str:
        """The parameter whose values, or whose optimizer's state, a tensor is."""
        return name if name in self._model_places else name.rpartition("/")[0]

    def _cut(self, name: str, place: Place) -> int:
        return self.manifest.shards[self._parameter(name)] if len(place) > 1 else 0

    def _shape_of(self, name: str) -> tuple[int, ...]:
        parameter = self._parameter(name)
        return self.entry(parameter, self._model_places[parameter]).shape

    @functools.cached_property
    def _model_places(self) -> dict[str, Place]:
        return self.places(MODEL)

    def _tensors(
        self, files: Mapping[str, str], *, keep: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors by the names that they have in their files."""
        for file_name in dict.fromkeys(files.values()):
            with self._naming(file_name), self.folder.open(self.name, file_name) as file:
                for name in (n for n, place in files.items() if place == file_name):
                    tensor, crc = read_tensor(file, self.header(file_name)[name], keep=keep)
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

    def states(
        self,
        parameters: Collection[str] | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> StateByName:
        """What optimizers keep of some parameters, None: of all, by the names that were saved.

        Args:
            parts: of these parameters, of which only these parts are wanted.
        """

        def is_asked_for(parameter: str) -> bool:
            return parameters is None or parameter in parameters

        parts = parts or {}
        (numbers,) = self.values(self.manifest.numbers)
        states: StateByName = {}
        for key, of_one in numbers.items():
            name, number, num_parts = split_name(key)
            part = parts.get(name)
            mine = part.number if part is not None and part.num_parts == num_parts else 0
            if is_asked_for(name) and number == mine:
                states[name] = of_one
        places = self.places(OPTIMIZER)
        names = [name for name in places if is_asked_for(name.rpartition("/")[0])]
        parts_of = {n: parts[p] for n in names if (p := n.rpartition("/")[0]) in parts}
        for name, value in self.read({name: places[name] for name in names}, parts_of).items():
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
                source.check_tensor(tensor, file_name)
            except DamagedCheckpoint as error:
                yield str(error)


def num_parameters(source: Source) -> int:
    """Elements of the model's parameters; with its buffers if the weights were imported."""
    buffers = source.places(RANK)
    return sum(
        math.prod(source.entry(name, place).shape)
        for name, place in source.places(MODEL).items()
        if buffer_prefix(0) + name not in buffers
    )
