"""Calls that wait for other processes, each ended by a deadline of its own."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from .. import _C
from ..errors import PeerLost, PeerTimeout, StageError

_SLICE_SECONDS = 0.1
_GRACE_SECONDS = 0.5
"""A group's own timeout, which leaves no thread behind, comes first by so many seconds."""

_Result = TypeVar("_Result")


class CallInThread(Generic[_Result]):
    """A call made in a thread of its own, which is left behind if it does not return.

    Attributes:
        result: what it gives or raises.
    """

    def __init__(self, name: str, call: Callable[[], _Result]) -> None:
        self.result: Future[_Result] = Future()
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], _Result]) -> None:
        try:
            self.result.set_result(call())
        except BaseException as error:
            self.result.set_exception(error)

    def get(self) -> _Result:
        """Returns what it gave, or raises it. Once the result is there."""
        self._thread.join()
        return self.result.result()


_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave(name: str, call: Callable[[], object]) -> None:
    """Makes a call that waits until others leave a group, too, in a thread of its own."""
    thread = threading.Thread(target=call, name=f"pd2 {name}", daemon=True)
    _leaving.add(thread)
    thread.start()


def wait_for_leaving(seconds: float) -> None:
    """Waits for what :func:`leave` has begun.

    The interpreter ends threads that are left, which C++ code that frees a group does not stand.
    """
    end = time.monotonic() + seconds
    for thread in list(_leaving):
        thread.join(max(0.0, end - time.monotonic()))


class Deadline:
    """Ends waiting for other processes after ``seconds``, or when the pipeline has failed.

    A call into torch.distributed may never return: it asks the process group's store, which a
    process serves that may be stopped, or whose machine may be gone. And it cannot be ended from
    outside. So it is made in a thread of its own, which is left behind if it does not return.

    Attributes:
        fault: ends waiting when it is raised, and is raised when waiting fails.
    """

    def __init__(self, seconds: float, fault: _C.Fault) -> None:
        self.seconds = seconds
        self.fault = fault

    def wait(self, action: str, call: Callable[[], _Result]) -> _Result:
        """Returns what ``call`` gives.

        Args:
            action: what all ranks do, for the error.

        Raises:
            PeerTimeout: it did not return in time.
            PeerLost: it failed, as a connection broke.
            StageError: the pipeline failed meanwhile.
        """
        start = time.monotonic()
        made = CallInThread(f"pd2 {action}", call)
        while not wait([made.result], _SLICE_SECONDS).done:
            failure = self.fault.error
            if failure is not None:
                raise failure
            if time.monotonic() - start > self.patience:
                raise self.late(action)
        error = made.result.exception()
        if isinstance(error, StageError) or not isinstance(error, RuntimeError):
            return made.get()
        raise self._failure(self.kind_of_loss(start), action, str(error))

    @property
    def patience(self) -> float:
        """After so many seconds whoever waits gives up by itself."""
        return self.seconds + _GRACE_SECONDS

    def late(self, action: str) -> StageError:
        """The failure of a rank that has waited for so long; the first of this process."""
        return self._failure(PeerTimeout, action, f"no answer for {self.seconds} s")

    def kind_of_loss(self, start: float) -> type[PeerTimeout | PeerLost]:
        """What a call into torch.distributed that failed has met, by the time since ``start``.

        Torch tells a timeout from a broken connection by its text alone.
        """
        is_late = time.monotonic() - start > 0.9 * self.seconds
        return PeerTimeout if is_late else PeerLost

    def _failure(self, kind: type[StageError], action: str, cause: str) -> StageError:
        """The first failure of this process: this one, unless another one came before."""
        self.fault.raise_(
            kind(f"a rank was lost while {action}: {cause}", action=action, cause=cause)
        )
        failure = self.fault.error
        assert failure is not None
        return failure
