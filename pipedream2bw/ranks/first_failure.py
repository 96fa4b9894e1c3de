"""The first failure of any rank, passed on to all through the process group's store."""

from __future__ import annotations

import contextlib
import threading

from torch.distributed.distributed_c10d import Store

from .. import _C
from ..errors import StageError, from_document, to_document

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 1.0


class FirstFailure:
    """Tells the other ranks what failed here, and raises here what failed elsewhere.

    The process that hosts the store may be stopped, or its machine gone: a call then never returns.
    So one thread alone speaks to the store, and nobody waits for it without a deadline.

    Args:
        store: the process group's.
        name: of the pipeline, the same on every rank.
        fault: raised when another rank has failed; its failure is told to the others.
    """

    def __init__(self, store: Store, name: str, fault: _C.Fault) -> None:
        self._store = store
        self._key = f"pipedream2bw/{name}/failure"
        self._fault = fault
        self._reported: StageError | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._known = threading.Event()
        self._thread_is_stuck = False
        self._first = ""  # the document of the first failure, if it is known
        self._thread = threading.Thread(
            target=self._pass_on, name=f"{name} watches for failures", daemon=True
        )
        self._thread.start()

    def report(self, failure: StageError) -> StageError:
        """Tells the others why this rank failed; returns the first failure that any rank told.

        That is ``failure`` itself if no other rank was faster, or if the store does not answer.
        """
        self._reported = failure
        self._wake.set()
        if not self._known.wait(_ANSWER_SECONDS):
            self._thread_is_stuck = True
        is_mine = self._first in ("", to_document(failure))
        return failure if is_mine else from_document(self._first)

    def close(self) -> None:
        """Ends the thread, or leaves it behind if the store does not answer."""
        self._closed.set()
        self._wake.set()
        if not self._thread_is_stuck and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_SECONDS)

    def _pass_on(self) -> None:
        with contextlib.suppress(Exception):  # the store may have died with its host
            while not self._first:
                self._wake.wait(_LOOK_SECONDS)
                failure = self._reported or self._fault.error
                if failure is not None:
                    told: bytes = self._store.compare_set(self._key, "", to_document(failure))
                    self._first = told.decode()
                elif self._closed.is_set():
                    break
                elif self._store.check([self._key]):
                    self._first = self._store.get(self._key).decode()
                    self._known.set()  # before devices are given time to come to rest
                    self._fault.raise_(from_document(self._first))
        self._known.set()
