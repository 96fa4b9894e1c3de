"""Saves a run now and then, and goes on with it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..checks import check_whole_number
from ..errors import DamagedCheckpoint, StageError
from ..optimizer.optimizer import PipelineOptimizer
from ..pipeline.module import PipelineModule
from ..ranks.agreement import Announcement, Operation
from .frequency import Frequency
from .load import load_from
from .manifest import read_manifest
from .preemption import Preempted, Signals, ignore_in_worker
from .save import OUR_EXTRA, Beside, Saver, Stateful
from .saving import Saving
from .source import Source

log = logging.getLogger("pipedream2bw")

_NOTHING, _SAVE, _STOP = 0, 1, 2
"""What a rank wishes that all do after the batch."""

_MOST_FAILURES = 3


class Checkpointer:
    """Saves a run now and then, and goes on with it after any interruption.

    ::

        ckpt = pd2.Checkpointer("checkpoints", pipe, opt, data=sampler, every="auto")
        ckpt.resume()
        for x, y in batches:
            pipe.train_step(x, target=y)
            opt.step()
            sampler.advance()
            ckpt.step()

    Saving drains nothing, see :func:`save`; a save that fails (a full disk) warns, and the run goes
    on. A run that is killed at any moment goes on from the newest checkpoint that is whole, with
    the same bits, on any number of stages. Every rank makes it and calls its methods.

    Args:
        path, data, schedulers, extra: see :func:`save`.
        every: batches from one save to the next; a time, such as ``"10min"``; or ``"auto"``: as
            often as ``max_overhead`` allows.
        max_overhead: the share of the training time that saving may add, with ``"auto"``.
        keep: how many checkpoints stay, at least 2.
        keep_every: those of every so many batches stay, too.
        preempt: signals at which the run is saved after the batch under way, and ends with
            :class:`Preempted`, on all ranks, whichever one gets the signal.

    Raises:
        ValueError, TypeError: on every rank, naming the rule and both values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pipe: PipelineModule,
        opt: PipelineOptimizer,
        *,
        data: Stateful | None = None,
        schedulers: Sequence[Stateful] = (),
        extra: Mapping[str, Any] | None = None,
        every: int | str = "auto",
        max_overhead: float = 0.035,
        keep: int = 3,
        keep_every: int | None = None,
        preempt: Iterable[str] = ("SIGTERM",),
    ) -> None:
        self._session = session = pipe.session
        self._opt = opt
        self._frequency: Frequency = session.control.together(
            lambda: _frequency(every, max_overhead, keep, keep_every),
            same={"every": every, "keep": keep, "keep_every": keep_every},
        )
        self._keep, self._keep_every = keep, keep_every
        self._beside = Beside(
            data=data,
            schedulers=schedulers,
            extra={**(extra or {}), f"{OUR_EXTRA}frequency": self._frequency},
        )
        self._saver = Saver(path, pipe, opt, self._beside)
        self._signals: Signals = session.control.together(lambda: Signals(preempt))
        self._under_way: list[tuple[Saving, int]] = []  # and the train_steps before
        self._failures = 0  # in a row
        self._last_step: float | None = None
        self.extra: dict[str, Any] = {}
        """The values of ``extra`` that :meth:`resume` found and that are no objects."""
        session.wish = self._wish
        session.before_evaluation = self._before_evaluation

    worker_init_fn = staticmethod(ignore_in_worker)
    """For a ``DataLoader``: its workers outlive the signals at which the run is saved."""

    # ------------------------------------------------------------------ going on

    def resume(self) -> int:
        """Loads the newest checkpoint that is whole; gives the number of the batch that follows.

        That is 0 if there is none. One that is damaged is renamed (``....corrupt``), if the place
        allows it, and the next older one taken, the same on all ranks.

        Raises:
            OSError: the place cannot be read.
            ValueError: it does not fit this pipeline; names both values.
        """
        session, control, folder = self._session, self._session.control, self._saver.folder
        session.flush_for(Operation.load)
        control.from_first(folder.clean)
        steps: list[int] = control.from_first(folder.steps)
        for step in steps:
            error: DamagedCheckpoint | None = None
            try:
                source = session.together(lambda step=step: self._verified(step))  # type: ignore[misc]
                self.extra = load_from(source, session, self._opt, self._beside, generators=True)
            except DamagedCheckpoint as found:
                error = found
            if error is None:
                return session.accumulation.num_updates
            now = control.from_first(lambda step=step: self._set_aside(step))  # type: ignore[misc]
            log.warning("%s: the next older checkpoint is taken; %s", error, now)
        return 0

    def _set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint; says what became of it."""
        try:
            return f"it is {self._saver.folder.set_aside(step)} now"
        except OSError as error:
            return f"it could not be renamed: {error}"

    def _verified(self, step: int) -> Source:
        """Opens a checkpoint; each rank reads some of the files to compare their sums."""
        control, folder = self._session.control, self._saver.folder
        source = Source(folder, read_manifest(folder, step))
        for number, name in enumerate(sorted(source.manifest.files)):
            is_mine = number % control.size == self._session.grid.rank
            source.check_file(name, sums=is_mine)
        return source

    # ------------------------------------------------------------------ saving

    def step(self) -> None:
        """Saves if it is time to. After ``opt.step()``, and whatever counts batches.

        Raises:
            OSError: three saves in a row have failed.
            Preempted: a signal came; the run has been saved.
        """
        session = self._session
        now = time.monotonic()
        if self._last_step is not None:
            self._frequency.batch_ended(now - self._last_step, is_saving=bool(self._under_way))
        self._look_at_ended()
        wish = session.agreed_wish
        if wish == _STOP:
            self._save_and_stop()
        batch = session.accumulation.num_updates
        every = self._frequency.batches
        if wish == _SAVE or (self._frequency.is_fixed and every and batch % every == 0):
            self._save()
        self._last_step = time.monotonic() if self._last_step is None else now

    def _wish(self) -> int:
        """What this rank wishes that all do after the batch that begins."""
        if self._signals.received:
            return _STOP
        decides = self._session.grid.rank == 0 and not self._frequency.is_fixed
        is_free = not self._under_way
        return _SAVE if decides and is_free and self._frequency.is_due() else _NOTHING

    def _save(self) -> Saving:
        session = self._session
        # One after the other, as far as this needs no further batch.
        for saving, train_steps in list(self._under_way):
            if session.num_train_steps - train_steps >= session.schedule.most_batches_behind:
                self._wait_for(saving)
        with session.ending.lost_ranks_close():
            try:
                session.agree(
                    Operation.save, session.accumulation.num_updates, self._check_failures
                )
            except OSError:
                self._failures = 0  # who goes on nevertheless wants it tried again
                raise
        saving = self._saver.save(then=self._retain)
        self._under_way.append((saving, session.num_train_steps))
        self._frequency.save_began()
        return saving

    def _wait_for(self, saving: Saving) -> None:
        timeout = self._session.control.timeout
        error: BaseException | None = TimeoutError(f"it took more than {timeout:g} s")
        with contextlib.suppress(TimeoutError):
            error = saving.done.exception(timeout)
        self._ended(saving, error)

    def _check_failures(self) -> Announcement:
        if self._failures >= _MOST_FAILURES:
            raise OSError(
                f"{self._saver.folder.path}: {self._failures} checkpoints in a row could not be "
                f"saved: {self._last_failure}"
            )
        return Announcement()

    def _look_at_ended(self) -> None:
        for saving, _ in list(self._under_way):
            if saving.done.done():
                self._ended(saving, saving.done.exception())

    def _ended(self, saving: Saving, error: BaseException | None) -> None:
        self._under_way = [each for each in self._under_way if each[0] is not saving]
        if error is None:
            self._failures = 0
            self._frequency.save_ended(sum(saving.seconds.values()))
            return
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, StageError):  # else a batch before it was discarded
            self._failures += 1
            self._last_failure = text
        warnings.warn(
            f"checkpoint {saving.step} was not saved, training goes on: {text}", stacklevel=3
        )

    def _retain(self) -> None:
        """Removes checkpoints that need not stay. In the thread that wrote the newest."""
        folder = self._saver.folder
        with contextlib.suppress(OSError, ValueError):
            steps = folder.steps()
            newest = Source.newest(folder)
            for name in newest.manifest.files:
                newest.check_file(name, sums=False)
            for step in steps[self._keep :]:
                if self._keep_every is None or step % self._keep_every:
                    folder.remove(step)

    # ------------------------------------------------------------------ ending

    def _before_evaluation(self) -> None:
        if self._session.agreed_wish == _STOP and self._session.accumulation.is_between_batches:
            self._save_and_stop()

    def _save_and_stop(self) -> None:
        """Saves on all ranks at one batch, closes the pipeline and ends the program."""
        with contextlib.suppress(OSError):
            saving = self._save()
            saving.wait()
        self.close()
        self._session.close()
        raise Preempted(128 + (self._signals.received or 15))

    def close(self) -> None:
        """Waits for the saves under way; signals do what they did before. Every rank calls it."""
        if self._session.ending.is_open:
            self._session.flush_for(Operation.flush)
        for saving, _ in list(self._under_way):
            self._wait_for(saving)
        self._leave()

    def _leave(self) -> None:
        self._signals.restore()
        self._session.wish = lambda: _NOTHING
        self._session.before_evaluation = lambda: None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # on this rank alone, perhaps
            self._leave()


def _frequency(
    every: int | str, max_overhead: float, keep: int, keep_every: int | None
) -> Frequency:
    check_whole_number("keep", keep, at_least=2)
    if keep_every is not None:
        check_whole_number("keep_every", keep_every)
    return Frequency(every, max_overhead)
