"""Writes a checkpoint in a thread of each process, while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..json_document import Field
from ..optimizer.state_by_name import STAGES
from .commit import clean, commit, failed_name, is_whole, part_name
from .encoding import encode
from .manifest import Manifest, RankPart
from .saving import Saving
from .snapshot import RANK, Snapshot, wait_for
from .tensor_file import TENSORS, SavedFile, write_tensors
from .waiting import Waiting

log = logging.getLogger("pipedream2bw")

_AT_EXIT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """What a rank tells rank 0 that it has written; see :class:`Manifest`."""

    own: RankPart
    model_state: Any
    optimizer: Any
    numbers: Any
    files: Mapping[str, SavedFile]


@dataclasses.dataclass(kw_only=True, eq=False)
class Writer:
    """Writes a process's part of a checkpoint; one thread for each.

    Attributes:
        manifest: what every rank knows of it when the save begins.
        own: what is this rank's own, known then.
        runs: whose earlier checkpoint of the batch may be removed; None: any.
        then: called on rank 0 when the checkpoint is whole; must not raise.
    """

    saving: Saving
    snapshot: Snapshot
    manifest: Manifest
    own: RankPart
    num_ranks: int
    runs: Collection[str] | None
    then: Callable[[], None]
    written: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder, self.name = self.saving.folder, self.saving.name

    def start(self) -> None:
        """Begins, in a thread that does not keep the program from ending."""
        name = f"pipedream2bw: checkpoint {self.saving.step}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        # A thread drops its entry here after join() has returned, perhaps while the interpreter
        # ends: freeing tensors then would abort the process. What it runs is dropped before.
        this = weakref.ref(self)
        _ends_soon[thread] = lambda: (writer := this()) is None or writer.ends_soon()
        thread.start()

    def ends_soon(self) -> bool:
        """Says whether the writer has what it writes, or knows that it never will."""
        return self.saving.copied.done() or self.saving.is_ended()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        begin, rank, saving = time.monotonic(), self.own.rank, self.saving

        def took(part: str) -> None:
            nonlocal begin
            now = time.monotonic()
            saving.seconds[part], begin = now - begin, now

        try:
            self._wait_for_copies()
            took("snapshot")
            saving.snapshot.set_result(None)
            try:
                if rank == 0:
                    clean(self.folder, saving.timeout, but=self.name)
                self.folder.make(self.name)
                self._write_json(part_name(rank), dataclasses.asdict(self._write_part()))
                took("write")
                if rank == 0:
                    whole = _merged(self.manifest, self._all_parts())
                    commit(self.folder, self.name, whole, self.runs)
            except BaseException as error:
                if not is_whole(self.folder, self.name):  # else it failed afterwards
                    self._give_up(f"{type(error).__name__}: {error}")
                raise
            if rank != 0:
                self._wait_for_commit()
            took("commit")
            if rank == 0:
                self.then()
            saving.done.set_result(None)
        except BaseException as error:
            self.snapshot.tensors.clear()  # the error's traceback refers to them
            if saving.is_ended():  # nobody looks any more
                log.warning("checkpoint %d was not saved: %s", saving.step, str(error))
            for future in (saving.snapshot, saving.done):
                if not future.done():
                    future.set_exception(error)

    def _wait_for_copies(self) -> None:
        copied = self.saving.copied
        while not copied.done():
            with contextlib.suppress(TimeoutError):
                copied.exception(timeout=0.1)
            if self.saving.is_ended() and not copied.done():
                step = self.saving.step
                raise RuntimeError(f"the pipeline ended before batch {step} was copied")
        copied.result()
        wait_for(self.snapshot.under_way)

    def _write_part(self) -> _Part:
        """Writes this rank's files of tensors."""
        snapshot, rank = self.snapshot, self.own.rank
        if snapshot.refused is not None:
            raise snapshot.refused
        of_rank: dict[str, Any] = {}
        optimizer = encode(snapshot.shared, f"rank{rank}/optimizer", of_rank)
        numbers = encode(snapshot.numbers, f"rank{rank}/numbers", of_rank)
        snapshot.add(RANK, of_rank)
        files = {}
        for kind, tensors in sorted(snapshot.tensors.items()):
            if tensors:
                file_name = f"{kind}-{rank + 1:05d}-of-{self.num_ranks:05d}{TENSORS}"
                self.written.append(file_name)
                # Stages copy in any order; what is larger is first, so that all are aligned.
                ordered = sorted(tensors.items(), key=lambda kv: (-kv[1].element_size(), kv[0]))
                with self.folder.writing(self.name, file_name) as file:
                    files[file_name] = write_tensors(file, dict(ordered), kind, rank)
        return _Part(
            own=self.own,
            model_state=snapshot.model_state,
            optimizer=optimizer,
            numbers=numbers,
            files=files,
        )

    # ------------------------------------------------------------------ between ranks

    def _write_json(self, file_name: str, value: Any) -> None:
        self.folder.write(self.name, file_name, data=json.dumps(value).encode())

    def _told_by(self, rank: int, names: Collection[str]) -> dict[str, Any] | None:
        """A rank's part, or what failed there; None while no whole one is among the files."""
        for file_name in (failed_name(rank), part_name(rank)):
            if file_name in names:
                with contextlib.suppress(OSError, ValueError):
                    told: dict[str, Any] = json.loads(self.folder.read(self.name, file_name))
                    return told
        if failed_name(rank, has_room=False) in names:
            return {"error": "there was no room to say why"}
        return None

    def _waiting(self) -> Waiting:
        saving = self.saving
        return Waiting(saving.timeout, saving.has_failed, lambda: self.folder.bytes_in(self.name))

    def _all_parts(self) -> list[_Part]:
        """All ranks' parts, when they are there. Rank 0 alone."""
        parts: dict[int, _Part] = {}
        waiting = self._waiting()
        while missing := [rank for rank in range(self.num_ranks) if rank not in parts]:
            names = self.folder.names(self.name)
            for rank in missing:
                told = self._told_by(rank, names)
                if told is not None and "error" in told:
                    raise OSError(f"rank {rank} could not write its part: {told['error']}")
                if told is not None:
                    parts[rank] = Field(told, part_name(rank)).read(_Part)
            absent = [str(rank) for rank in missing if rank not in parts]
            if absent:
                ranks = ", ".join(absent)
                waiting.look(f"the parts of ranks {ranks} did not appear in {self.name}")
        return [parts[rank] for rank in sorted(parts)]

    def _wait_for_commit(self) -> None:
        waiting, step = self._waiting(), self.saving.step
        while not is_whole(self.folder, self.name):
            told = None
            with contextlib.suppress(OSError):
                names = self.folder.names(self.name)
                told = self._told_by(0, names) if names else {"error": "its folder is gone"}
            if told is not None and "error" in told:
                self._make_room()
                raise OSError(f"rank 0 could not complete checkpoint {step}: {told['error']}")
            waiting.look(f"rank 0 did not complete checkpoint {step}")

    def _give_up(self, error: str) -> None:
        """Makes room, and lets the other ranks know; the next save removes the folder."""
        rank = self.own.rank
        is_listed = self._told_by(rank, {part_name(rank)}) is not None
        if rank == 0 or not is_listed:  # else rank 0 may make a checkpoint of the files
            self._make_room()
        try:
            self._write_json(failed_name(rank), {"error": error})
        except OSError:
            with contextlib.suppress(OSError):
                self.folder.write_nothing(self.name, failed_name(rank, has_room=False))

    def _make_room(self) -> None:
        for file_name in self.written:
            with contextlib.suppress(OSError):
                self.folder.remove(self.name, file_name)


_ends_soon: weakref.WeakKeyDictionary[threading.Thread, Callable[[], bool]] = (
    weakref.WeakKeyDictionary()
)
"""The threads that write, and whether each has what it writes, or knows that it never will."""


@atexit.register
def _finish_writing() -> None:
    """Lets the threads end before the interpreter does, which would end them inside torch's code.

    That would abort the process: C++ functions are left that must not be left so.
    """
    end = time.monotonic() + _AT_EXIT_SECONDS
    for thread, ends_soon in list(_ends_soon.items()):
        thread.join(max(0.0, end - time.monotonic()) if ends_soon() else 0)
        if thread.is_alive():
            log.warning("%s was not saved: the program ended first", thread.name)


def _merged(manifest: Manifest, parts: list[_Part]) -> Manifest:
    return dataclasses.replace(
        manifest,
        model_state={name: state for part in parts for name, state in part.model_state.items()},
        optimizer=_merged_optimizers([part.optimizer for part in parts]),
        numbers={name: of for part in parts for name, of in part.numbers.items()},
        ranks=tuple(part.own for part in parts),
        files={name: file for part in parts for name, file in part.files.items()},
    )


def _merged_optimizers(of_ranks: list[Any]) -> Any:
    """The first rank's, with what the stages of all keep and the groups' members of all."""
    if of_ranks[0] is None:
        return None
    return of_ranks[0] | {
        "optimizers": [
            {
                **of_each[0],
                STAGES: {k: v for each in reversed(of_each) for k, v in each[STAGES].items()},
                "members": [
                    sorted({name for names in of_group for name in names})
                    for of_group in zip(*(each["members"] for each in of_each), strict=True)
                ],
            }
            for of_each in zip(*(each["optimizers"] for each in of_ranks), strict=True)
        ]
    }
