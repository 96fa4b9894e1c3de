"""The saves of a run that have not ended, and what became of those before."""

from __future__ import annotations

import dataclasses
import time
import warnings

from ..errors import StageError
from ..ranks.agreement import Announcement, Operation
from ..runtime.session import Session
from .frequency import Frequency
from .saving import Saving
from .waiting import done_by, wait_together

_MOST_FAILURES = 3
_MOST_LATE = 2
_SIGN_SECONDS = 0.5
"""After which a rank that waits shows the others that it lives."""


@dataclasses.dataclass(eq=False)
class _UnderWay:
    """A save, and how many train_steps there had been before.

    Attributes:
        copied: when everything was seen to be copied: no batch has to come for it any more.
        saw_evaluation: whether there was one since it began.
    """

    saving: Saving
    train_steps: int
    copied: float | None = None
    saw_evaluation: bool = False


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
        self._all: list[_UnderWay] = []
        # Which took too long and count as failed; a file system that hangs holds them and a copy
        # of the state each.
        self._late: list[Saving] = []
        self._failures = 0  # in a row
        self._last_failure = ""

    @property
    def savings(self) -> tuple[Saving, ...]:
        """The saves that this process knows not to have ended, oldest first."""
        return tuple(each.saving for each in self._all)

    def add(self, saving: Saving) -> None:
        """Adds one that begins."""
        self._all.append(_UnderWay(saving, self._session.num_train_steps))

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
        """Counts failures in a row from here on."""
        self._failures = 0

    def wait_together(self, *, needs_no_batch: bool = False) -> None:
        """Waits until they have ended or take too long. Every rank calls it.

        All agree now and then: so the time for one that is stopped begins at once, not after the
        time for its save.

        Args:
            needs_no_batch: leaves out those that may need a further batch.
        """
        wait_together(
            self._session,
            Operation.wait_for_saves,
            lambda: self._have_ended(_SIGN_SECONDS, needs_no_batch),
        )

    def wait_alone(self) -> None:
        """Waits until they have ended or take too long, on this rank alone."""
        while not self._have_ended(_SIGN_SECONDS):
            pass

    def _have_ended(self, seconds: float, needs_no_batch: bool = False) -> bool:
        """Waits for so long; says whether all have ended, or take too long."""
        session = self._session
        end = time.monotonic() + seconds
        behind = session.schedule.most_batches_behind if needs_no_batch else 0
        return all(
            self._has_ended(each, end)
            for each in list(self._all)
            if session.num_train_steps - each.train_steps >= behind
        )

    def _has_ended(self, each: _UnderWay, end: float) -> bool:
        session, saving = self._session, each.saving

        def is_discarded() -> bool:
            return session.ending.is_open and session.control.discards.first is not None

        each.copied = time.monotonic() if each.copied is None else each.copied
        last = each.copied + session.control.timeout
        if done_by(saving.done, min(last, end), is_discarded):
            self._ended(each, saving.done.exception())
        elif is_discarded():  # it may wait for that batch; the next agreement ends both
            return True
        elif time.monotonic() < last:
            return False
        else:
            self._too_long(each)
        return True

    def look(self) -> None:
        """Looks which have ended, without waiting."""
        now = time.monotonic()
        for each in list(self._all):
            if each.saving.done.done():
                self._ended(each, each.saving.done.exception())
            elif each.saving.snapshot.done():  # no batch has to come: it is being written
                each.copied = now if each.copied is None else each.copied
                if now - each.copied > self._session.control.timeout:
                    self._too_long(each)

    def _too_long(self, each: _UnderWay) -> None:
        self._late.append(each.saving)
        self._ended(each, each.saving.too_long())

    def _ended(self, each: _UnderWay, error: BaseException | None) -> None:
        self._all.remove(each)
        if error is not None:
            self.failed(each.saving.step, error)
            return
        self._failures = 0
        seconds = dict(each.saving.seconds)
        if each.saw_evaluation:  # for which the copies may have waited
            del seconds["snapshot"]
        self._frequency.save_ended(sum(seconds.values()))

    def failed(self, step: int, error: BaseException) -> None:
        """Warns that a checkpoint was not saved."""
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, StageError):  # else a batch before it was discarded
            self._failures += 1
            self._last_failure = text
        warnings.warn(f"checkpoint {step} was not saved, training goes on: {text}", stacklevel=4)
