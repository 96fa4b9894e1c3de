"""How a pipeline ends: the first failure ends it on every rank, and every later call names that."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import NoReturn

from ..errors import PeerLost, PeerTimeout, RemoteTraceback, StageError, reworded
from ..ranks.deadline import wait_for_leaving
from .local_stages import LocalStages, last_uncaught


class Ending:
    """Whether this process's part of a pipeline is open, and what has ended it.

    Attributes:
        batch: the number of the next train_step, for what other ranks read of a failure here.
    """

    def __init__(self, stages: LocalStages) -> None:
        self.batch = 0
        self._ended_by: RuntimeError | None = None
        self._pid, self._is_parents = os.getpid(), False
        self._has_weights = True  # which have not been given back to the model
        self._spoilt: list[int] = []  # stages whose weights mean nothing
        self._in_use = threading.RLock()
        self._stages = stages
        self._control = stages.control
        _all.add(self)

    @property
    def is_open(self) -> bool:
        """Whether nothing has ended it."""
        return self._ended_by is None

    @property
    def has_failed(self) -> bool:
        """Whether a failure has ended it, and what this process holds can be read."""
        return isinstance(self._ended_by, StageError)

    @property
    def is_closed(self) -> bool:
        """Whether the pipeline was ended without a failure."""
        return not self.is_open and not self.has_failed

    def check_open(self) -> None:
        """Raises the first failure if the pipeline has failed, RuntimeError if it was closed."""
        if self._ended_by is not None:
            raise reworded(self._ended_by, f"the pipeline is closed: {self._ended_by}")
        if self._control.fault.raised:
            self._fail()

    def check_readable(self) -> None:
        """Raises as :meth:`check_open` does, of a closed pipeline that cannot be read any more.

        One that a failure has ended, or that was closed, still has this process's weights. Shares
        that replicas have were put together before alone. What a device was still making when
        another process was lost cannot be read: it raises the failure, too.
        """
        if self._spoilt and self._ended_by is not None:
            raise reworded(
                self._ended_by,
                f"the weights of stages {self._spoilt} cannot be read: a device was still making "
                "them from what another process was to send. Go on from a checkpoint. What ended "
                f"it: {self._ended_by}",
            )
        is_shared = any(stage.weights.engine.is_shared for stage in self._stages)
        if not self._has_weights or (is_shared and not self.has_failed):
            self.check_open()

    def weights_given_back(self) -> None:
        """After this nothing can be read."""
        self._has_weights = False
        self._ended_by = RuntimeError("unsplit() was called, whose result has the weights")

    def check_process(self) -> None:
        """Raises RuntimeError in a process that was forked, which has none of the threads."""
        if self._is_parents:
            self.check_open()

    def leave_to_parent(self) -> None:
        """In a process that was forked: nothing ends here what the parent goes on with."""
        self._is_parents, self._has_weights = True, False
        self._ended_by = RuntimeError(
            f"this process, {os.getpid()}, was forked from the pipeline's, {self._pid}, and has "
            "none of its threads. Call it in the process that made it, and give workers tensors"
        )
        self._stages.end.detach()
        # Never freed: that would wait for threads, even when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._stages))

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Raises RuntimeError in a thread that calls while another one does."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("the pipeline is in another thread's call: use one thread at a time")
        try:
            yield
        finally:
            self._in_use.release()

    @contextlib.contextmanager
    def failing_closes(self) -> Iterator[None]:
        """Closes the pipeline on a failure; a mistake that all ranks found leaves it open."""
        with self.one_at_a_time():
            try:
                yield
            except BaseException as error:
                if self._control.fault.raised:
                    self._fail()
                is_open = isinstance(error, StageError) and error.discarded is not None
                # In one process the main thread alone was interrupted, while it waited.
                in_processes = self._stages.grid.in_processes
                is_open = is_open or (isinstance(error, KeyboardInterrupt) and not in_processes)
                if not isinstance(error, (ValueError, TypeError)) and not is_open:
                    self.abort(f"{type(error).__name__} {error}".strip(), error=error)
                raise

    @contextlib.contextmanager
    def lost_ranks_close(self) -> Iterator[None]:
        """Closes the pipeline if another rank is lost or has failed; other errors leave it open."""
        try:
            yield
        except BaseException:
            if self._control.fault.raised:
                self._fail()
            raise

    def finish_submitted(self) -> None:
        """Waits for what needs no later batch, on devices too, and for losses that others wait for.

        Raises:
            PeerTimeout: another rank does not answer.
        """
        self._stages.finish_submitted()
        deadline = self._control.deadline
        if not self._stages.losses.finish(deadline.patience):
            raise deadline.late("losses came")
        self._stages.wait_for_devices()

    def abort(
        self,
        reason: str,
        *,
        kind: type[StageError] = StageError,
        error: BaseException | None = None,
    ) -> None:
        """Ends this process's part at once; ranks that wait for it learn the reason.

        Args:
            kind: of error that they raise.
            error: whose traceback they chain.
        """
        grid = self._stages.grid
        here = f"{self._control.place}, batch {self.batch}: " if grid.in_processes else ""
        stages = grid.stages_of_model
        failure = kind(
            f"{here}{reason}",
            rank=grid.rank,
            stage=stages[0] if len(stages) == 1 else None,
            replica=grid.replica,
            batch=self.batch,
            cause=reason,
        )
        if error is not None:
            failure.__cause__ = RemoteTraceback("".join(traceback.format_exception(error)))
        self._control.report(failure)
        self._control.fault.raise_(failure)
        self.end(failure)

    def end(self, reason: RuntimeError) -> None:
        """Ends threads and connections."""
        self._ended_by = reason
        for stage in self._stages:
            stage.runner.forget()
        self._stages.stop()
        self._spoilt = [
            stage.index
            for stage in self._stages
            if stage.executor.is_spoilt(stage.index, has_buffers=bool(stage.weights.buffer_names))
        ]
        for stage in self._stages:  # what has been made can still be read
            stage.weights.show_newest()
        for stage in self._stages:  # no update is under way any more
            for guard in stage.weights.guards:
                guard.remove()
            for handle in stage.weights.handles:
                handle.grad = None

    def at_exit(self) -> None:
        """Work that others wait for is finished first."""
        if self._ended_by is not None:
            return
        error = last_uncaught()
        reason = "the program ended"
        if error is not None:
            reason += f" with {type(error).__name__}: {error}"
        else:
            reason += ". Make the same calls on every rank"
            if not (self._control.fault.raised or self._stages.joint_updates.need_later_batches):
                with contextlib.suppress(Exception):
                    self.finish_submitted()
        with contextlib.suppress(Exception):
            self.abort(reason, kind=PeerLost, error=error)

    def _fail(self) -> NoReturn:
        """Raises the first failure of all ranks, and ends this one's part."""
        mine, kept = self._control.fault.error, self._control.fault.kept
        assert mine is not None
        discarded = self._control.discards.failure
        is_cause = discarded is not None and isinstance(mine, (PeerLost, PeerTimeout))
        if discarded is not None and is_cause:
            _, why, kept = discarded
            # Its batch was to be taken back, but a rank waits: for this one's shard of a stage.
            mine = reworded(why, f"{str(why).rstrip('.')}. Nobody could take that back: {mine}")
        original = self._stages.take_error(kept)
        first = self._control.report(mine)
        first = mine if is_cause else first
        self.end(first)
        text = str(first)
        if (untold := self._control.untold) is not None:
            original = original or untold
            text += f". This rank had failed before: {type(untold).__name__}: {untold}"
        # Another object than the one that is kept, which would keep what its traceback refers to.
        raised = reworded(first, text)
        raise raised from (original if first is mine and original else first.__cause__)


_LEAVE_SECONDS = 10.0

_all: weakref.WeakSet[Ending] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Threads end before the interpreter does."""
    for ending in list(_all):
        ending.at_exit()
    wait_for_leaving(_LEAVE_SECONDS)


def _leave_to_parent() -> None:
    for ending in list(_all):
        ending.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
