"""The saves of a run that have not ended, and what became of those before."""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from concurrent.futures import Future

from ..checks import check_number
from ..errors import StageError
from ..ranks.operations import Announcement, Operation
from ..runtime.session import Session
from .folder import Folder, step_of
from .frequency import Frequency
from .waiting import done_by, wait_together

_MOST_FAILURES = 3
_MOST_LATE = 2
_SIGN_SECONDS = 0.5
"""After which a rank that waits shows the others that it lives."""


class _Awaited(Future[None]):
    """A part of a save: whoever trains and waits for it waits for no batch that does not come."""

    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = weakref.ref(saving)

    def result(self, timeout: float | None = None) -> None:
        if timeout is None:
            self._bring()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is None:
            self._bring()
        return super().exception(timeout)

    def _bring(self) -> None:
        saving = self._saving()
        if saving is not None and not self.done():
            saving.bring_copy()


class Saving:
    """A save under way.

    Attributes:
        step: of the checkpoint: the number of the batch that follows.
        path: of the checkpoint's own folder, ``.../step-<step>-<nonce>``.
        snapshot: done when this process's state has been copied. Under ``"2bw"`` that is in the
            next batch, or at the next drain. The thread that saved drains, in one process, if it
            waits for this or for ``done`` before that batch; with several processes it is told to
            call :meth:`wait`.
        done: when the checkpoint is whole, on every rank. Its exception says why it never will be.
    """

    def __init__(self, session: Session, folder: Folder, name: str) -> None:
        self.step = step_of(name)
        self.path = f"{folder.path.rstrip('/')}/{name}"
        self._thread = threading.get_ident()
        self.snapshot: Future[None] = _Awaited(self)
        self.done: Future[None] = _Awaited(self)
        # Done in the batch or the drain that copies the state; ``snapshot`` soon after it.
        self.copied: Future[None] = Future()
        self.seconds: dict[str, float] = {}
        """How long each part took: ``snapshot``, ``write``, ``commit``."""
        self.train_steps = session.num_train_steps
        """How many there had been before."""
        self.seen_copied = math.inf
        """When everything was seen to be copied: no batch has to come for it any more."""
        self.saw_evaluation = False
        """Whether there was one since it began."""
        self.folder, self.name, self.timeout = folder, name, session.control.timeout
        # The thread that writes has this, too: a pipeline that is dropped ends nevertheless.
        self._session, self._ending = weakref.ref(session), weakref.ref(session.ending)
        self._fault = session.control.fault

    def is_ended(self) -> bool:
        """Whether the pipeline has ended, so that nothing will be copied any more."""
        return self._fault.raised or (ending := self._ending()) is None or not ending.is_open

    def has_failed(self) -> bool:
        """Whether the pipeline has ended by a failure, so that other ranks may have ended, too."""
        return self._fault.raised or ((e := self._ending()) is not None and e.has_failed)

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
        seconds = self.timeout if timeout is None else timeout
        if not done_by(self.done, time.monotonic() + seconds):
            raise self.too_long(seconds)
        self.done.result()

    def bring_copy(self) -> None:
        """Drains if this thread alone can bring the batch in which the state is copied.

        Raises:
            RuntimeError: with several processes, as all of them have to drain.
        """
        session = self._session()
        if self.copied.done() or session is None or not session.ending.is_open:
            return
        # Buffers are copied as the next batch begins, weights when their update has been made.
        needed = max(1, session.schedule.most_batches_behind)
        later = session.num_train_steps - self.train_steps
        if threading.get_ident() != self._thread or later >= needed:
            return
        if session.grid.in_processes:
            raise RuntimeError(
                f"checkpoint {self.step}: it is copied in the next batch or at a drain. Call "
                "wait() of the save on every rank, or wait for it after the next batch"
            )
        session.flush_for(Operation.flush)

    def too_long(self, seconds: float | None = None) -> TimeoutError:
        """Says that it has not ended within so many seconds, or those of the pipeline."""
        seconds = self.timeout if seconds is None else seconds
        return TimeoutError(
            f"{self.folder.path}: checkpoint {self.step} took more than {seconds:g} s"
        )


class SavesUnderWay:
    """Waits for a run's saves, warns of those that fail, and counts these.

    Args:
        path: of the run's folder, for errors.
        frequency: is told what a save took.
    """

    def __init__(self, session: Session, path: str, frequency: Frequency) -> None:
        self._session = session
        self._path = path
        self._frequency = frequency
        self._all: list[Saving] = []
        # Which took too long and count as failed; a file system that hangs holds them and a copy
        # of the state each.
        self._late: list[Saving] = []
        self._failures = 0  # in a row
        self._last_failure = ""

    @property
    def savings(self) -> tuple[Saving, ...]:
        """The saves that this process knows not to have ended, oldest first."""
        return tuple(self._all)

    def add(self, saving: Saving) -> None:
        self._all.append(saving)

    def see_evaluation(self) -> None:
        """Copies may wait for it."""
        for each in self._all:
            each.saw_evaluation = True

    def check(self) -> Announcement:
        """Whether this rank may begin another.

        Raises:
            OSError: too many in a row have failed.
            TimeoutError: too many are held by the file system.
        """
        if self._failures >= _MOST_FAILURES:
            raise OSError(
                f"{self._path}: {self._failures} checkpoints in a row could not be saved: "
                f"{self._last_failure}"
            )
        self._late = [saving for saving in self._late if not saving.done.done()]
        if len(self._late) >= _MOST_LATE:
            steps = ", ".join(str(saving.step) for saving in self._late)
            raise TimeoutError(f"{self._path}: checkpoints {steps} are still being written")
        return Announcement()

    def count_anew(self) -> None:
        self._failures = 0

    def wait_together(self, *, needs_no_batch: bool = False) -> None:
        """Waits until they have ended or take too long. Every rank calls it.

        All agree now and then: so the time for one that is stopped begins at once, not after the
        time for its save.

        Args:
            needs_no_batch: leaves out those that may need a further batch.
        """
        wait_together(
            self._session, Operation.wait_for_saves, lambda: self._have_ended(needs_no_batch)
        )

    def wait_alone(self) -> None:
        """Waits until they have ended or take too long, on this rank alone."""
        while not self._have_ended():
            pass

    def _have_ended(self, needs_no_batch: bool = False) -> bool:
        """Waits for a while; says whether all have ended, or take too long."""
        session = self._session
        end = time.monotonic() + _SIGN_SECONDS
        behind = session.schedule.most_batches_behind if needs_no_batch else 0

        def is_discarded() -> bool:
            return session.ending.is_open and session.control.discards.first is not None

        for each in list(self._all):
            if session.num_train_steps - each.train_steps < behind:
                continue
            each.seen_copied = min(each.seen_copied, time.monotonic())
            done_by(each.done, min(each.seen_copied + each.timeout, end), is_discarded)
            # A save may wait for a batch that is discarded; the next agreement ends both.
            if not self._end(each) and not is_discarded():
                return False
        return True

    def look(self) -> None:
        """Looks which have ended, without waiting."""
        for each in list(self._all):
            if each.snapshot.done():  # no batch has to come: it is being written
                each.seen_copied = min(each.seen_copied, time.monotonic())
            self._end(each)

    def _end(self, saving: Saving) -> bool:
        """Says whether one has ended or takes too long; then it is under way no more."""
        if saving.done.done():
            error = saving.done.exception()
        elif time.monotonic() >= saving.seen_copied + saving.timeout:
            error = saving.too_long()
            self._late.append(saving)
        else:
            return False
        self._all.remove(saving)
        if error is not None:
            self.failed(saving.step, error)
            return True
        self._failures = 0
        seconds = dict(saving.seconds)
        if saving.saw_evaluation:  # for which the copies may have waited
            del seconds["snapshot"]
        self._frequency.save_ended(sum(seconds.values()))
        return True

    def failed(self, step: int, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, StageError):  # else a batch before it was discarded
            self._failures += 1
            self._last_failure = text
        warnings.warn(f"checkpoint {step} was not saved, training goes on: {text}", stacklevel=4)
