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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..json_document import Field
from .copies import wait_for
from .cut import Cut
from .encoding import encode
from .folder import MANIFEST, Folder, name_of
from .manifest import Manifest, RankPart, SavedFile, SavedSettings, of_bytes
from .replacing import FAILED, commit, part_name
from .tensor_file import write_tensors
from .under_way import Saving
from .waiting import Waiting

log = logging.getLogger("pipedream2bw")

_AT_EXIT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What the manifest says and every rank knows when a save begins.

    Attributes:
        own: this rank's part.
        tensors: those of the user's state that this rank writes.
    """

    nonce: str
    batch: int
    train_steps: int
    random_seed: int | None
    settings: SavedSettings
    trainable: tuple[str, ...]
    tied: Mapping[str, str]
    schedulers: Any
    own: RankPart
    tensors: Mapping[str, torch.Tensor]


class Writer:
    """Writes a process's part of a checkpoint; one thread for each.

    Args:
        is_ended: says whether the pipeline has ended, so that nothing will be copied any more.
        has_failed: says whether it has by a failure, so that other ranks may have ended, too.
        timeout: seconds that a rank waits for the others' parts.
        then: called on rank 0 when the checkpoint is whole; must not raise.
    """

    def __init__(
        self,
        folder: Folder,
        cut: Cut,
        head: Head,
        *,
        is_ended: Callable[[], bool],
        has_failed: Callable[[], bool],
        timeout: float,
        then: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._cut = cut
        self._head = head
        self._is_ended = is_ended
        self._has_failed = has_failed
        self._timeout = timeout
        self._then = then
        self._mark = ""  # in the names of files, if the step was saved before
        self._written: list[str] = []
        self._missing = set(range(head.settings.num_ranks))
        """Whose parts rank 0 has not seen."""

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
            name = self._folder.name_at_first(self._cut.batch, self._head.nonce)
            try:
                self._folder.begin(self._cut.batch, self._head.nonce)
                if self._folder.is_whole(self._cut.batch):
                    self._mark = f"-{self._head.nonce}"
                self._write_part(name)
                took("write")
                if self._head.own.rank == 0:
                    self._commit(name)
            except BaseException as error:
                if not self._is_whole():  # else it failed after the manifest was written
                    self._give_up(name, saving, error)
                raise
            if self._head.own.rank != 0:
                self._wait_for_commit(name)
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

    def _give_up(self, name: str, saving: Saving, error: BaseException) -> None:
        """Lets the other ranks know, and sees to it that nothing stays."""
        rank, is_told = self._head.own.rank, False
        text = f"{type(error).__name__}: {error}"
        self._missing.discard(rank)
        for file_name in self._written:  # which makes room for the next one
            self._folder.remove_file(name, file_name)

        def is_settled() -> bool:
            nonlocal is_told
            is_told = is_told or self._tell(name, text)
            return self._is_cleared(name) if rank == 0 else is_told

        if is_settled():
            return
        saving.done.set_exception(error)  # training need not wait for what follows
        _ends_soon.pop(threading.current_thread())
        waiting = self._waiting(name)
        with contextlib.suppress(TimeoutError):
            while not self._is_ended() and not is_settled():
                waiting.look(name)
        if rank == 0:
            self._folder.discard(name, self._head.nonce)

    def _tell(self, name: str, error: str) -> bool:
        """Writes that this rank has failed, if it can; if there is no room, without a word."""
        rank = self._head.own.rank
        file_name = FAILED if rank == 0 else part_name(rank)
        with contextlib.suppress(OSError):
            self._write_json(name, file_name, {"nonce": self._head.nonce, "error": error})
            return True
        with contextlib.suppress(OSError):
            if self._folder.is_local:  # where this save has a folder of its own
                self._folder.write_nothing(name, file_name)
                return True
        return False

    def _is_cleared(self, name: str) -> bool:
        """Removes everything if no rank will write there any more; says whether that is so.

        Each rank writes its part, or that it failed, when it comes to it. Rank 0 alone.
        """
        written = {r for r in self._missing if self._read_json(name, part_name(r)) is not None}
        self._missing -= written
        if not self._missing:
            self._folder.discard(name, self._head.nonce)
        return not self._missing

    def _wait_for_copies(self) -> None:
        while not self._cut.copied.done():
            with contextlib.suppress(TimeoutError):
                self._cut.copied.exception(timeout=0.1)
            if self._is_ended() and not self._cut.copied.done():
                raise RuntimeError(f"the pipeline ended before batch {self._cut.batch} was copied")
        self._cut.copied.result()
        wait_for(self._cut.under_way)

    # ------------------------------------------------------------------ this rank's part

    def _write_part(self, name: str) -> None:
        self._write_json(name, part_name(self._head.own.rank), self._files(name))

    def _files(self, name: str) -> dict[str, Any]:
        cut, head, rank = self._cut, self._head, self._head.own.rank
        if cut.refused is not None:
            raise cut.refused
        ranks = head.settings.num_ranks
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
                file_name = f"{kind}-{rank + 1:05d}-of-{ranks:05d}{self._mark}.safetensors"
                self._written.append(file_name)
                # Stages copy in any order; what is larger is first, so that all are aligned.
                ordered = sorted(of_kind.items(), key=lambda kv: (-kv[1].element_size(), kv[0]))
                with self._folder.writing(name, file_name) as file:
                    written = write_tensors(file, dict(ordered))
                files[file_name] = SavedFile(kind=kind, rank=rank, **written._asdict())
        return {
            "nonce": head.nonce,
            "own": dataclasses.asdict(head.own),
            "model_state": cut.model_state,
            "optimizer": optimizer,
            "numbers": numbers,
            "files": {key: dataclasses.asdict(file) for key, file in files.items()},
        }

    def _write_json(self, name: str, file_name: str, value: Any) -> None:
        """Other ranks see the file when it is whole."""
        self._written.append(file_name)
        self._folder.write(name, file_name, data=json.dumps(value).encode())

    def _read_json(self, name: str, file_name: str) -> dict[str, Any] | None:
        """What a rank wrote in this save; None as long as it is not there as a whole."""
        with contextlib.suppress(OSError, ValueError):
            text = self._folder.read(name, file_name)
            if self._folder.is_local and not text:
                return {"error": "there was no room to say why"}
            value: dict[str, Any] = json.loads(text)
            return value if value.pop("nonce") == self._head.nonce else None
        return None

    # ------------------------------------------------------------------ all parts

    def _commit(self, name: str) -> None:
        """Puts all ranks' parts together. Rank 0 alone."""
        folder, head = self._folder, self._head
        parts = self._gather(name)
        for file_name in (*map(part_name, range(len(parts))), FAILED):
            folder.remove_file(name, file_name)
        commit(folder, name, _manifest(head, parts))

    def _gather(self, name: str) -> list[Field]:
        parts: dict[int, Field] = {}
        waiting = self._waiting(name)
        while True:
            for rank in sorted(self._missing):
                part = self._read_json(name, part_name(rank))
                if part is None:
                    continue
                self._missing.remove(rank)
                if "error" in part:
                    raise OSError(f"rank {rank} could not write its part: {part['error']}")
                parts[rank] = Field(part, part_name(rank))
            if not self._missing:
                return [parts[rank] for rank in sorted(parts)]
            missing = ", ".join(map(str, sorted(self._missing)))
            waiting.look(f"the parts of ranks {missing} did not appear in {name}")

    def _waiting(self, name: str) -> Waiting:
        return Waiting(self._timeout, self._has_failed, lambda: self._folder.bytes_in(name))

    def _wait_for_commit(self, name: str) -> None:
        waiting = self._waiting(name)
        step = self._head.batch
        while not self._is_whole():
            failed = self._read_json(name, FAILED)
            if failed is not None:
                raise OSError(f"rank 0 could not complete checkpoint {step}: {failed['error']}")
            is_gone = False
            with contextlib.suppress(OSError):
                is_gone = not self._folder.holds(name)
            if is_gone and not self._is_whole():  # not renamed meanwhile either
                raise OSError(f"rank 0 gave up checkpoint {step}: its folder {name} is gone")
            waiting.look(f"rank 0 did not complete checkpoint {step}")

    def _is_whole(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            manifest = of_bytes(self._folder.read(name_of(self._head.batch), MANIFEST))
            return manifest.nonce == self._head.nonce
        return False


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


def _manifest(head: Head, parts: list[Field]) -> Manifest:
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
    return Manifest(
        nonce=head.nonce,
        batch=head.batch,
        train_steps=head.train_steps,
        random_seed=head.random_seed,
        settings=head.settings,
        trainable=head.trainable,
        tied=head.tied,
        model_state=model_state,
        optimizer=_merge(optimizers),
        numbers=numbers,
        schedulers=head.schedulers,
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
