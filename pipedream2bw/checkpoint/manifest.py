"""What a checkpoint's manifest says: its file ``checkpoint.json``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import DamagedCheckpoint
from ..json_document import Document, check_sum, fields_of, parse_json
from .folder import MANIFEST, Folder, step_of
from .tensor_file import SavedFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPart:
    """What is one process's own.

    Attributes:
        replica, shard: of which the buffers are. Earlier versions did not write ``shard``.
        data: the position in the data.
        extra: the user's.
        generators: the states of Python's, NumPy's and torch's random numbers.
    """

    rank: int
    replica: int
    shard: int
    data: Any
    extra: Any
    generators: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """How the pipeline was made, for comparison."""

    schedule: str
    delays: tuple[int, ...]
    num_stages: int
    num_ranks: int
    width: int
    num_microbatches: int | tuple[int, ...]  # of every replica, or of each
    precision: str
    torch: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Document):
    """A whole checkpoint. The defaults are those of weights that were imported.

    Attributes:
        nonce: another one for every save.
        batch: the number of the batch that follows: optimizer steps so far.
        saved_before: how many checkpoints of this batch became whole before it. Of two of a batch,
            the one with more is the newer. Earlier versions did not write it: they kept one.
        train_steps: ``train_step`` calls so far.
        random_seed: of the random numbers that training draws; None: they were torch's own.
        settings: of the pipeline; None: weights that were imported, without a run.
        trainable: the names of the parameters that are trained.
        tied: further names of parameters, and the name under which each was saved.
        shards: the dimension in which each tensor-parallel parameter is cut, by its first name; its
            parts have names of their own, see :mod:`.parts`. Earlier versions did not write it.
        model_state: what ``get_extra_state`` gave, by name.
        optimizer: what the optimizers share; None if none was saved.
        numbers: what optimizers keep of a parameter beside tensors.
        schedulers: of the learning rate.
        ranks: what is each process's own.
        files: by name.
    """

    FORMAT: ClassVar[str] = "pipedream2bw checkpoint"
    VERSION: ClassVar[int] = 1
    HAS_SUM: ClassVar[bool] = True

    nonce: str
    batch: int
    saved_before: int = 0
    train_steps: int = 0
    random_seed: int | None = None
    settings: SavedSettings | None = None
    trainable: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    model_state: Any = dataclasses.field(default_factory=dict)
    optimizer: Any = None
    numbers: Any = dataclasses.field(default_factory=dict)
    schedulers: Any = dataclasses.field(default_factory=list)
    ranks: tuple[RankPart, ...] = ()
    files: Mapping[str, SavedFile] = dataclasses.field(default_factory=dict)

    @property
    def num_shards(self) -> int:
        """How many processes saved each stage of a replica."""
        return max(1, len({part.shard for part in self.ranks}))

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.size for file in self.files.values())


def weights_index(files: Mapping[str, SavedFile]) -> bytes:
    """What the index of the newest weights holds."""
    of_model = {name: file for name, file in files.items() if file.kind == "model"}
    index = {
        "metadata": {"total_size": sum(file.data_size for file in of_model.values())},
        "weight_map": {key: name for name, file in of_model.items() for key in file.tensors},
    }
    return json.dumps(index, indent=1).encode()


def of_bytes(text: bytes) -> Manifest:
    """The manifest in a file's bytes; raises as :func:`read_manifest`."""
    try:
        check_sum(text)
        value = parse_json(text)
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error
    document = fields_of(value, Manifest.FORMAT, Manifest.VERSION)
    del document.value["sum"]
    document.value.setdefault("saved_before", 0)
    document.value.setdefault("shards", {})
    ranks = document.value.get("ranks")
    for part in ranks if isinstance(ranks, list) else ():
        if isinstance(part, dict):  # else the reading tells
            part.setdefault("shard", 0)
    return document.read(Manifest)


def read_manifest(folder: Folder, name: str) -> Manifest:
    """Reads the manifest of the checkpoint whose folder has this name.

    Raises:
        DamagedCheckpoint: it is missing or not what was written.
        ValueError: it is of another version.
    """
    where, step = f"{name}/{MANIFEST}", step_of(name)
    try:
        found = of_bytes(folder.read(name, MANIFEST))
    except (DamagedCheckpoint, FileNotFoundError, IsADirectoryError) as error:
        raise DamagedCheckpoint(f"{where}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if found.batch != step:
        raise DamagedCheckpoint(f"{where}: batch {found.batch}, it must be {step}")
    num_ranks = found.settings.num_ranks if found.settings is not None else 0
    ranks = sorted(part.rank for part in found.ranks)
    if len(ranks) != num_ranks or ranks != list(range(len(ranks))):
        shown = ", ".join(map(str, ranks))
        raise DamagedCheckpoint(f"{where}: parts of the ranks {shown}, there must be {num_ranks}")
    for file_name in found.files:
        if not re.fullmatch(r"[\w.-]+", file_name):
            raise DamagedCheckpoint(
                f"{where}: file {file_name!r}, it must be in the checkpoint's folder"
            )
    return found
