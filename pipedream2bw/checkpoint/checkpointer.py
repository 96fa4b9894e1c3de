"""Saves a run now and then, and goes on with it."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..checks import check_whole_number
from ..errors import StageError
from ..optimizer.optimizer import PipelineOptimizer
from ..pipeline.module import PipelineModule
from ..ranks.operations import Announcement, Operation
from ..runtime.closing import close
from ..runtime.extension import CHECKPOINTER, Extension, TakenBack
from ..runtime.loading import flush_to_load
from .commit import look, retain, steps_in, tried
from .folder import run_of
from .frequency import Frequency
from .load import load_whole
from .preemption import Preempted, Signals, ignore_in_worker
from .save import OUR_EXTRA, Saver, Stateful, UserState
from .saving import SavesUnderWay, Saving
from .waiting import on_first_rank

log = logging.getLogger("pipedream2bw")


class Checkpointer(Extension):
    """Saves a run now and then, and goes on with it after any interruption.

    >>> with pd2.Checkpointer("checkpoints", pipe, opt, data=sampler, every="auto") as ckpt:
    ...     found = ckpt.resume()
    ...     for x, y in batches:
    ...         loss = pipe.train_step(x, target=y)
    ...         opt.step()
    ...         sampler.advance()
    ...         ckpt.step()

    Saving drains nothing, see :func:`save`; a save that fails (a full disk) warns, and the run goes
    on. A run may be killed at any moment. It goes on from the newest checkpoint that is whole, with
    the same bits, on any number of stages. Every rank makes it and calls its methods. A pipeline
    has one at a time; :func:`save` saves to further places.

    Args:
        path, data, schedulers, extra: see :func:`save`.
        every: batches from one save to the next; a time, such as ``"10min"``; or ``"auto"``: as
            often as ``max_overhead`` allows.
        max_overhead: the share of the training time that saving may add, with ``"auto"``.
        keep: how many checkpoints stay, at least 2.
        keep_every: the first one of every so many batches stays, too.
        preempt: signals at which the run is saved and ends with :class:`Preempted`. That happens on
            all ranks, whichever one gets the signal: after the batch under way, or in
            :meth:`close`.

    Raises:
        ValueError, TypeError: on every rank, naming the rule and both values; also of state that
            cannot be saved.
        OSError, TimeoutError: on every rank: the folder cannot be made, or does not answer.
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

        def checked() -> Frequency:
            for other in session.extensions.at(CHECKPOINTER):
                raise ValueError(
                    f"{os.fspath(path)}: the pipeline has a Checkpointer, of {other.name}, which "
                    "must be closed before another one is made; pd2.save() saves to further places"
                )
            check_whole_number("keep", keep, at_least=2)
            if keep_every is not None:
                check_whole_number("keep_every", keep_every)
            return Frequency(every, max_overhead)

        same = {"every": every, "keep": keep, "keep_every": keep_every}
        with session.ending.lost_ranks_close():
            self._frequency: Frequency = session.control.together(checked, same=same)
        self._user_state = UserState(
            data=data,
            schedulers=schedulers,
            extra={**(extra or {}), f"{OUR_EXTRA}frequency": self._frequency},
        )
        self._signals: Signals = session.together(lambda: Signals(preempt))
        self._saver = Saver(path, pipe, opt, self._user_state)
        self._folder = self._saver.folder
        self._saver.check()
        there = on_first_rank(
            session, self._folder, "trying the folder", lambda: tried(self._folder)
        )
        # This run, and those of what was there before it.
        self._runs = {self._saver.run, *map(run_of, there)}
        self._of_others: list[str] = []  # which another run has saved since; rank 0 finds them
        self._retain = functools.partial(
            retain, self._folder, keep, keep_every, self._runs, self._of_others
        )
        self._under_way = SavesUnderWay(session, self._folder.path, self._frequency)
        self._last_step: float | None = None
        self._evaluated = False  # since the last step()
        # The batch before which the user counted last, and at which everything goes together.
        self._stepped = session.accumulation.num_updates
        # The batch that was saved or loaded last, and how many had been discarded then.
        self._kept = (-1, 0)
        self._newest = -1  # of this run's checkpoints; -1: it may be another run's folder
        self.extra: dict[str, Any] = {}
        """The values of ``extra`` that :meth:`resume` found and that are no objects."""
        self._saves = False  # what a rank has asked all for, with the last train_step
        self._stop_signal = 0  # the greatest that a rank has got, so that all exit alike
        self.name = self._folder.path
        session.extensions.put(CHECKPOINTER, [self])
        self._signals.notice()

    worker_init_fn = staticmethod(ignore_in_worker)
    """For a ``DataLoader``: its workers outlive the signals at which the run is saved."""

    # ------------------------------------------------------------------ going on

    def resume(self, step: int | None = None) -> int:
        """Loads the newest checkpoint that is whole; gives the number of the batch that follows.

        That is 0 if there is none. Those that are damaged or cannot be read are named. Once an
        older one is found that is whole, they are set aside by a file ``corrupt`` in their folder.
        The whole one is taken, the same on all ranks. With ``replica_sync`` all sites have it.

        Args:
            step: a certain checkpoint, to go back to. Newer ones are set aside by a file
                ``abandoned``.

        Raises:
            OSError: the place cannot be read.
            DamagedCheckpoint: there are checkpoints, and none is whole.
            ValueError: it does not fit this pipeline, or ranks see different folders; names both
                values.
            TimeoutError: the file system does not answer for half of the pipeline's ``timeout``.
        """
        session = self._session
        flush_to_load(session, Operation.load)
        self._under_way.wait_together()
        extra = load_whole(session, self._folder, step, self._opt, self._user_state)
        self._newest = self._stepped = session.accumulation.num_updates
        if extra is None:
            return 0
        there = functools.partial(look, self._folder)
        action = "looking for other checkpoints"
        self._runs |= set(map(run_of, on_first_rank(session, self._folder, action, there)[0]))
        self._of_others.clear()
        self._kept = self._now()
        self.extra = extra
        return self._newest

    def _check_branch(self) -> None:
        """Refuses to train where newer checkpoints are of another run. On rank 0."""
        batch = self._session.accumulation.num_updates
        newer = [step for step in steps_in(self._folder) if step > batch]
        if newer:
            raise ValueError(
                f"{self._folder.path}: it has checkpoint {newer[0]}, this run is at {batch}: "
                "go on with resume(), go back with resume(step=...), or choose another folder"
            )

    # ------------------------------------------------------------------ saving

    @property
    def under_way(self) -> tuple[Saving, ...]:
        """The saves that this process knows not to have ended, oldest first."""
        return self._under_way.savings

    @property
    def batches_between(self) -> int | None:
        """How many batches there are from one save to the next; None: not known yet, or by time."""
        return self._frequency.batches

    def step(self) -> None:
        """Saves if it is time to. After ``opt.step()``, and whatever counts batches.

        Raises:
            OSError: three saves in a row have failed; another run saves to the folder, too, that
                this one has not gone on from.
            TimeoutError: the file system hangs when the run looks for newer checkpoints, once.
            Preempted: a signal came; the run has been saved, or a warning says why not.
            ValueError: the folder has newer checkpoints, of a run that this one does not go on
                from; on every rank.
        """
        session = self._session
        now = time.monotonic()
        batch = self._stepped = session.accumulation.num_updates
        if batch < self._newest or self._newest < 0:
            action = "looking for newer checkpoints"
            on_first_rank(session, self._folder, action, self._check_branch)
            self._newest = batch
        if self._last_step is not None:
            seconds = None if self._evaluated else now - self._last_step
            self._frequency.batch_ended(seconds, is_saving=bool(self._under_way.savings))
        self._under_way.look()
        if self._stop_signal:
            self._save_and_stop()
        every = self._frequency.batches
        is_due = self._saves or (self._frequency.is_fixed and every and batch % every == 0)
        if is_due and not self._has_saved():
            self._save(self._check_save)
        self._last_step = time.monotonic() if self._last_step is None else now
        self._evaluated = False

    def announce(self, mine: Announcement) -> Announcement:
        """Adds what this rank asks all for; the pipeline calls it with every train_step."""
        decides = self._session.grid.rank == 0 and not self._frequency.is_fixed
        is_free = not self._under_way.savings
        saves = decides and is_free and self._frequency.is_due()
        return mine._replace(saves=saves, stop_signal=self._signals.received)

    def announced(self, everyone: Sequence[Announcement]) -> None:
        """Hears what all ranks ask for."""
        self._saves = any(rank.saves for rank in everyone)
        self._stop_signal = max(rank.stop_signal for rank in everyone)

    def _check_save(self) -> Announcement:
        """Raises if this rank may not begin another save; see :meth:`SavesUnderWay.check`."""
        if self._of_others:
            raise OSError(
                f"{self._folder.path}: another run saves there, too ({self._of_others[0]}), which "
                "this one has not gone on from. Give each run a folder of its own"
            )
        return self._under_way.check()

    def _save(self, check: Callable[[], Announcement]) -> None:
        """Begins a save, unless something cannot be saved: then it warns.

        Args:
            check: raises OSError if no rank is to save, TimeoutError if it is put off.
        """
        session = self._session
        batch = session.accumulation.num_updates
        self._under_way.wait_together(needs_no_batch=True)  # one after the other
        try:
            with session.ending.lost_ranks_close():
                session.agree(Operation.save, batch, check)
            saving = self._saver.save(runs=self._runs, then=self._retain)
        except (TypeError, ValueError, TimeoutError) as error:  # on every rank
            self._frequency.save_began()  # it is not tried again at once
            self._under_way.failed(batch, error)
            return
        except OSError:
            self._under_way.count_anew()  # who goes on nevertheless wants it tried again
            raise
        self._under_way.add(saving)
        self._newest, self._kept = batch, self._now()
        self._frequency.save_began()

    # ------------------------------------------------------------------ ending

    def before_evaluation(self) -> None:
        """All ranks begin an evaluation."""
        self._evaluated = True
        self._under_way.see_evaluation()
        self._stop_if_told()

    def taken_back(self, taken: TakenBack) -> None:
        """Batches have not been."""
        self._stepped = min(self._stepped, taken.batch)

    def _stop_if_told(self) -> None:
        """Ends the run if a signal came and the user has counted all batches that are saved."""
        accumulation = self._session.accumulation
        is_counted = accumulation.is_between_batches and accumulation.num_updates == self._stepped
        if self._stop_signal and is_counted:
            self._save_and_stop()

    def _save_and_stop(self) -> None:
        """Saves on all ranks at one batch, closes the pipeline and ends the program."""
        try:
            while not self._has_saved_last():
                pass
            close(self._session)
        except BaseException as error:
            self._leave(error)
            raise
        # A signal that comes to this rank later than to others ends it no earlier.
        self._leave(hands_on=False)
        raise Preempted(128 + self._stop_signal)

    def _now(self) -> tuple[int, int]:
        """The run's state, as far as counts tell it: after a discarded batch the data go on."""
        session = self._session
        return session.accumulation.num_updates, session.discarding.num_times

    def _has_saved_last(self) -> bool:
        """Saves and drains; False if a batch was discarded, so that what is left is to be saved."""
        try:
            try:
                if not self._has_saved():
                    self._save(Announcement)  # however many saves have failed
            except OSError as error:
                warnings.warn(f"the run ends without a last checkpoint: {error}", stacklevel=4)
            self._finish()
        except StageError as error:
            if error.discarded is None:
                raise
            warnings.warn(str(error), stacklevel=4)
            return False
        return True

    def _has_saved(self) -> bool:
        """Whether there is a checkpoint of this state already; waits if it is under way."""
        session = self._session
        batch = session.accumulation.num_updates
        if self._kept != self._now():
            return False
        session.flush_for(Operation.flush)
        self._under_way.wait_together()
        folder, action = self._folder, f"looking for checkpoint {batch}"
        return on_first_rank(session, folder, action, lambda: batch in steps_in(folder))

    def close(self) -> None:
        """Waits for the saves under way; signals do what they did before. Every rank calls it.

        A signal that came since the last :meth:`step` saves the run and ends it here. Where it
        cannot (after an ``opt.step()`` without a :meth:`step`, or when the pipeline has ended) it
        does now what it did before.

        Raises:
            Preempted: a signal came; the run has been saved, or a warning says why not.
            StageError: a batch is discarded, or the pipeline has failed.
        """
        try:
            try:
                self._finish()
            except StageError as error:
                if error.discarded is not None:
                    self._hear_of_signals()
                    self._stop_if_told()
                raise
            self._hear_of_signals()
            self._stop_if_told()
        finally:
            self._leave()

    def _hear_of_signals(self) -> None:
        """Every rank calls this. Drained."""
        session, self._stop_signal = self._session, 0
        if session.ending.is_open:
            mine = Announcement(stop_signal=self._signals.received)
            with session.ending.failing_closes():
                told = session.agree(Operation.flush, session.num_train_steps, lambda: mine)
            self.announced(told)

    def _finish(self) -> None:
        try:
            if self._session.ending.is_open:
                self._session.flush_for(Operation.flush)
                self._under_way.wait_together()
        finally:  # a discarded batch leaves the saves before it as they are
            self._under_way.wait_alone()

    def _leave(self, error: BaseException | None = None, *, hands_on: bool = True) -> None:
        """Gives signals back; one that came and did nothing does now what it did before."""
        extensions = self._session.extensions
        if self in extensions.at(CHECKPOINTER):  # else another one has been made since
            extensions.put(CHECKPOINTER, [])
        received = self._signals.restore()
        if received and hands_on:
            if error is not None:  # which the signal hides if it ends the program
                log.error(
                    "%s came before this error", signal.Signals(received).name, exc_info=error
                )
            signal.raise_signal(received)

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
            self._leave(error)
