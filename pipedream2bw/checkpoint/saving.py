"""Writes a checkpoint in a thread of each process, while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from ..checks import check_number
from ..json_document import Field
from ..ranks.agreement import Announcement, Operation
from ..runtime.session import Session
from .commit import clean, commit, failed_name, is_whole, part_name
from .copies import wait_for
from .cut import Cut
from .encoding import encode
from .folder import Folder, name_of, step_of
from .manifest import Manifest, RankPart, SavedFile
from .tensor_file import TENSORS, write_tensors
from .waiting import Waiting, done_by

log = logging.getLogger("pipedream2bw")

_AT_EXIT_SECONDS = 20.0


class Saving:
    """A save under way.

    Attributes:
        step: of the checkpoint: the number of the batch that follows.
        path: of the checkpoint's own folder, ``.../step-<step>-<nonce>``.
        snapshot: done when this process's state has been copied. Under ``"2bw"`` that is in the
            next batch, or at the next drain.
        done: when the checkpoint is whole, on every rank. Its exception says why it never will be.
    """

    def __init__(self, session: Session, folder: Folder, name: str) -> None:
        self.step = step_of(name)
        self.path = f"{folder.path.rstrip('/')}/{name}"
        self.snapshot: Future[None] = Future()
        self.done: Future[None] = Future()
        self.seconds: dict[str, float] = {}
        """How long each part took: ``snapshot``, ``write``, ``commit``."""
        self._session = weakref.ref(session)
        self._folder = folder.path
        self._timeout = session.control.timeout

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is whole. Drains; every rank calls it.

        Args:
            timeout: seconds, after the drain; None: the pipeline's.

        Raises:
            OSError, RuntimeError: it could not be written; the pipeline has failed.
            TimeoutError: it takes longer, as where the file system hangs. It may yet become whole.
            TypeError, ValueError: ``timeout`` is no positive, finite number.
        """

        def check() -> Announcement:
            if timeout is not None:
                check_number("timeout", timeout, below=math.inf)
            return Announcement()

        session = self._session()
        if session is not None and session.ending.is_open:
            session.flush_for(Operation.flush, check)
        else:
            check()
        seconds = self._timeout if timeout is None else timeout
        if not done_by(self.done, time.monotonic() + seconds):
            raise self.too_long(seconds)
        self.done.result()

    def too_long(self, seconds: float | None = None) -> TimeoutError:
        """Says that it has not ended within so many seconds, or those of the pipeline."""
        seconds = self._timeout if seconds is None else seconds
        return TimeoutError(f"{self._folder}: checkpoint {self.step} took more than {seconds:g} s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What is known when a save begins.

    Attributes:
        manifest: what every rank knows of it.
        own: this rank's part.
        tensors: those of the user's state that this rank writes.
    """

    manifest: Manifest
    own: RankPart
    tensors: Mapping[str, torch.Tensor]


class Writer:
    """Writes a process's part of a checkpoint; one thread for each.

    Args:
        is_ended: says whether the pipeline has ended, so that nothing will be copied any more.
        has_failed: says whether it has by a failure, so that other ranks may have ended, too.
        num_ranks: that save.
        timeout: seconds that a rank waits for the others' parts.
        then: called on rank 0 when the checkpoint is whole; must not raise.
    """

    def __init__(
        self,
        folder: Folder,
        cut: Cut,
        head: Head,
        *,
        num_ranks: int,
        is_ended: Callable[[], bool],
        has_failed: Callable[[], bool],
        timeout: float,
        then: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._cut = cut
        self._head = head
        self._num_ranks = num_ranks
        self._is_ended = is_ended
        self._has_failed = has_failed
        self._timeout = timeout
        self._then = then
        self._name = name_of(cut.batch, head.manifest.nonce)
        self._written: list[str] = []  # files of tensors

    def start(self, saving: Saving) -> None:
        """Begins, in a thread that does not keep the program from ending."""
        name = f"pipedream2bw: checkpoint {saving.step}"
        thread = threading.Thread(target=self._run, args=(saving,), name=name, daemon=True)
        # A thread drops its entry here after join() has returned, perhaps while the interpreter
        # ends: freeing tensors then would abort the process. What it runs is dropped before.
        this = weakref.ref(self)
        _ends_soon[thread] = lambda: (writer := this()) is None or writer.ends_soon()
        thread.start()

    def ends_soon(self) -> bool:
        """Says whether the writer has what it writes, or knows that it never will."""
        return self._cut.copied.done() or self._is_ended()

    def _run(self, saving: Saving) -> None:
        with contextlib.suppress(OSError, AttributeError):  # training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        begin = time.monotonic()

        def took(part: str) -> None:
            nonlocal begin
            now = time.monotonic()
            saving.seconds[part], begin = now - begin, now

        try:
            self._wait_for_copies()
            took("snapshot")
            saving.snapshot.set_result(None)
            try:
                if self._head.own.rank == 0:
                    clean(self._folder, self._timeout, but=self._name)
                self._folder.make(self._name)
                self._write_json(part_name(self._head.own.rank), self._part())
                took("write")
                if self._head.own.rank == 0:
                    manifest = _put_together(self._head.manifest, self._gather())
                    commit(self._folder, self._name, manifest)
            except BaseException as error:
                if not is_whole(self._folder, self._name):  # else it failed afterwards
                    self._give_up(f"{type(error).__name__}: {error}")
                raise
            if self._head.own.rank != 0:
                self._wait_for_commit()
            took("commit")
            if self._head.own.rank == 0:
                self._then()
            saving.done.set_result(None)
        except BaseException as error:
            self._cut.tensors.clear()  # the error's traceback refers to them
            if self._is_ended():  # nobody looks any more
                log.warning("checkpoint %d was not saved: %s", saving.step, str(error))
            for future in (saving.snapshot, saving.done):
                if not future.done():
                    future.set_exception(error)

    def _give_up(self, error: str) -> None:
        """Makes room, and lets the other ranks know; the next save removes the folder."""
        rank = self._head.own.rank
        is_listed = self._told_by(rank, {part_name(rank)}) is not None
        if rank == 0 or not is_listed:  # else rank 0 may make a checkpoint of the files
            self._make_room()
        try:
            self._write_json(failed_name(rank), {"error": error})
        except OSError:
            with contextlib.suppress(OSError):
                self._folder.write_nothing(self._name, failed_name(rank, has_room=False))

    def _make_room(self) -> None:
        for file_name in self._written:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name, file_name)

    def _told_by(self, rank: int, names: Collection[str]) -> dict[str, Any] | None:
        """A rank's part, or what failed there; None as long as neither is there as a whole.

        Args:
            names: of the files that are there.
        """
        for file_name in (failed_name(rank), part_name(rank)):
            if file_name in names:
                with contextlib.suppress(OSError, ValueError):
                    told: dict[str, Any] = json.loads(self._folder.read(self._name, file_name))
                    return told
        if failed_name(rank, has_room=False) in names:
            return {"error": "there was no room to say why"}
        return None

    def _wait_for_copies(self) -> None:
        while not self._cut.copied.done():
            with contextlib.suppress(TimeoutError):
                self._cut.copied.exception(timeout=0.1)
            if self._is_ended() and not self._cut.copied.done():
                raise RuntimeError(f"the pipeline ended before batch {self._cut.batch} was copied")
        self._cut.copied.result()
        wait_for(self._cut.under_way)

    # ------------------------------------------------------------------ this rank's part

    def _part(self) -> dict[str, Any]:
        """Writes this rank's files; gives its part of the manifest."""
        cut, head, rank = self._cut, self._head, self._head.own.rank
        if cut.refused is not None:
            raise cut.refused
        tensors = {kind: dict(of_kind) for kind, of_kind in cut.tensors.items()}
        tensors.setdefault("rank", {}).update(head.tensors)
        optimizer = encode(
            None if cut.shared is None else cut.shared.document(),
            f"rank{rank}/optimizer",
            tensors["rank"],
        )
        numbers = encode(cut.numbers, f"rank{rank}/numbers", tensors["rank"])
        files = {}
        for kind, of_kind in sorted(tensors.items()):
            if of_kind:
                file_name = f"{kind}-{rank + 1:05d}-of-{self._num_ranks:05d}{TENSORS}"
                self._written.append(file_name)
                # Stages copy in any order; what is larger is first, so that all are aligned.
                ordered = sorted(of_kind.items(), key=lambda kv: (-kv[1].element_size(), kv[0]))
                with self._folder.writing(self._name, file_name) as file:
                    written = write_tensors(file, dict(ordered))
                files[file_name] = SavedFile(kind=kind, rank=rank, **written._asdict())
        return {
            "own": dataclasses.asdict(head.own),
            "model_state": cut.model_state,
            "optimizer": optimizer,
            "numbers": numbers,
            "files": {key: dataclasses.asdict(file) for key, file in files.items()},
        }

    def _write_json(self, file_name: str, value: Any) -> None:
        self._folder.write(self._name, file_name, data=json.dumps(value).encode())

    # ------------------------------------------------------------------ all parts

    def _gather(self) -> list[Field]:
        """All ranks' parts, when they are there. Rank 0 alone."""
        missing = set(range(self._num_ranks))
        parts: dict[int, Field] = {}
        waiting = self._waiting()
        while missing:
            names = self._folder.names(self._name)
            for rank in sorted(missing):
                part = self._told_by(rank, names)
                if part is not None and "error" in part:
                    raise OSError(f"rank {rank} could not write its part: {part['error']}")
                if part is not None:
                    parts[rank] = Field(part, part_name(rank))
            missing -= parts.keys()
            if missing:
                absent = ", ".join(map(str, sorted(missing)))
                waiting.look(f"the parts of ranks {absent} did not appear in {self._name}")
        return [parts[rank] for rank in sorted(parts)]

    def _waiting(self) -> Waiting:
        return Waiting(self._timeout, self._has_failed, lambda: self._folder.bytes_in(self._name))

    def _wait_for_commit(self) -> None:
        waiting, step = self._waiting(), self._cut.batch
        while not is_whole(self._folder, self._name):
            told = None
            with contextlib.suppress(OSError):
                names = self._folder.names(self._name)
                told = self._told_by(0, names) if names else {"error": "its folder is gone"}
            if told is not None and "error" in told:
                self._make_room()
                raise OSError(f"rank 0 could not complete checkpoint {step}: {told['error']}")
            waiting.look(f"rank 0 did not complete checkpoint {step}")


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


def _put_together(manifest: Manifest, parts: list[Field]) -> Manifest:
    files: dict[str, SavedFile] = {}
    numbers: dict[str, Any] = {}
    model_state: dict[str, Any] = {}
    optimizers = []
    ranks = []
    for part in parts:
        own, of_modules, optimizer, of_rank, its_files = part.fields(
            "own", "model_state", "optimizer", "numbers", "files"
        )
        ranks.append(own.read(RankPart))
        model_state.update(of_modules.value)
        optimizers.append(optimizer.value)
        numbers.update(of_rank.value)
        files.update({key: file.read(SavedFile) for key, file in its_files.entries().items()})
    return dataclasses.replace(
        manifest,
        model_state=model_state,
        optimizer=_merge(optimizers),
        numbers=numbers,
        ranks=tuple(ranks),
        files=files,
    )


def _merge(optimizers: list[Any]) -> Any:
    """The first rank's; but of an optimizer of which it has no parameter, the first that has.

    The members of groups are those of all ranks.
    """
    if optimizers[0] is None:
        return None
    merged = dict(optimizers[0])
    merged["optimizers"] = [
        {
            **next((each for each in theirs if not each["is_empty"]), theirs[0]),
            "members": [
                sorted({name for names in of_group for name in names})
                for of_group in zip(*(each["members"] for each in theirs), strict=True)
            ],
        }
        for theirs in zip(*(each["optimizers"] for each in optimizers), strict=True)
    ]
    return merged
