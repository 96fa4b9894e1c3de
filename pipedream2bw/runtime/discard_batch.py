"""Discards the batch that has no optimizer step yet, when the user says so or has left it."""

from __future__ import annotations

import warnings

from ..errors import StageError
from .local_stages import last_uncaught
from .session import Session


def discard_batch(session: Session) -> tuple[int, ...]:
    """Takes back the train_steps since the last optimizer step; gives their numbers.

    Every rank calls it. Drains.
    """
    session.ending.check_open()
    batch, first = session.accumulation.num_updates, session.num_train_steps
    if not session.accumulation.is_between_batches:
        first = session.discarding.first_train_step(batch)
        cause = "discard_batch() was called"
        session.control.discards.discard(batch, StageError(cause, cause=cause))
    last = session.num_train_steps
    try:
        with session.ending.failing_closes():
            session.drain()
    except StageError as error:
        if error.discarded is None or error.discarded[0] < first:
            raise
    return tuple(range(first, last))


def discard_left(session: Session) -> None:
    """Discards a batch if its step is missing and an interrupt, or an error, came since.

    Nobody has caught it, and the program has gone on: so it is a notebook or Python's prompt.
    """
    error, is_between = last_uncaught(), session.accumulation.is_between_batches
    if error in (None, session.uncaught_before) or session.grid.in_processes or is_between:
        return
    discarded = ", ".join(map(str, discard_batch(session)))
    warnings.warn(
        f"train_steps {discarded}, left by {type(error).__name__} before their opt.step(), "
        "were discarded",
        stacklevel=3,
    )
