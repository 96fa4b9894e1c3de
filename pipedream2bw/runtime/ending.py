"""How a pipeline ends: the first failure ends it on every rank, and every later call names that."""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

from .local_stages import LocalStages


class Ending:
    """Whether this process's part of a pipeline is open, and what has ended it."""

    def __init__(self, stages: LocalStages, place: Callable[[], str]) -> None:
        """``place`` says who and where this is, in front of a cause that other ranks get."""
        self.closed_because: str | None = None
        self._stages = stages
        self._control = stages.control
        self._place = place
        _all.add(self)

    @property
    def is_open(self) -> bool:
        """Whether nothing has ended it."""
        return self.closed_because is None

    def check_open(self) -> None:
        """Raises RuntimeError, naming the first cause, if the pipeline was closed or has failed."""
        if self.closed_because is not None:
            raise RuntimeError(f"the pipeline is closed: {self.closed_because}")
        if self._control.fault.cause is not None:
            self._fail()

    @contextlib.contextmanager
    def failing_closes(self) -> Iterator[None]:
        """Closes the pipeline on a failure; a mistake that all ranks found leaves it open."""
        try:
            yield
        except (ValueError, TypeError):
            if self._control.fault.cause is not None:
                self._fail()
            raise
        except BaseException as error:
            if self._control.fault.cause is not None:
                self._fail()
            self.abort(f"{type(error).__name__} {error}".strip())
            raise

    def finish_submitted(self) -> None:
        """Waits for what needs no later batch, and for the losses that others wait for."""
        self._stages.finish_submitted()
        self._stages.losses.finish(self._control.timeout)

    def abort(self, reason: str) -> None:
        """Ends this process's part at once; ranks that wait for it learn the reason."""
        reason = f"{self._place()}{reason}"
        self._control.report_cause(reason)
        self._control.fault.raise_(reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        """Ends threads and connections."""
        self.closed_because = reason
        for stage in self._stages:
            stage.runner.forget()
        self._stages.end()
        for stage in self._stages:  # no update is under way any more
            stage.weights.remove_guards()

    def at_exit(self) -> None:
        """Work that others wait for is finished first."""
        if self.closed_because is not None:
            return
        error = getattr(sys, "last_value", None)
        reason = "the program ended"
        if error is not None:
            reason += f" with {type(error).__name__}: {error}"
        elif self._control.fault.cause is None:
            with contextlib.suppress(Exception):
                self.finish_submitted()
        with contextlib.suppress(Exception):
            self.abort(reason)

    def _fail(self) -> NoReturn:
        """Raises the first cause of the fault on all ranks, and ends this one's part."""
        mine = self._control.fault.cause or "unknown cause"
        original = self._stages.first_error()
        cause = self._control.report_cause(mine)
        self.end(cause)
        raise failure(cause) from original


_all: weakref.WeakSet[Ending] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Threads end before the interpreter does."""
    for ending in list(_all):
        ending.at_exit()


class WrongLossError(RuntimeError, ValueError):
    """The last stage's ``loss_fn``, or a metric, gave something else than one number."""


class WrongLossTypeError(RuntimeError, TypeError):
    """The last stage's ``loss_fn``, or a metric, gave neither a tensor nor a number."""


def failure(cause: str) -> RuntimeError:
    """The error of every rank; ``cause`` is the first failure's text, the same on all."""
    last_line = cause.rstrip().rpartition("\n")[2]
    found = re.match(r"(ValueError|TypeError): (loss_fn|metrics\[.*\]) returned ", last_line)
    if found is None:
        return RuntimeError(cause)
    return (WrongLossError if found[1] == "ValueError" else WrongLossTypeError)(cause)
