"""Ends a pipeline once what was submitted is done."""

from __future__ import annotations

from ..errors import StageError
from ..ranks.operations import Announcement, Operation
from .session import Session


def give_back(session: Session) -> None:
    """Closes, and gives the model memory of its own, with the newest weights."""
    session.flush_to_read(Operation.flush)
    close(session)  # which shows the pipeline's memory for the last time
    for stage in session.stages.of_first_pipeline():
        weights, engine = stage.weights, stage.weights.engine
        for i, handle in enumerate(weights.handles):
            if handle is weights.originals[i]:
                newest = engine.master(engine.newest_slot, i)
                handle.data = newest.to(weights.device, copy=True)
    session.stages.options.precision.restore()
    session.ending.weights_given_back()


def close(session: Session) -> None:
    """Ends all once what was submitted is done; StageError if the last batch was discarded."""
    if not session.ending.is_open:
        return
    discarded: StageError | None = None
    with session.ending.one_at_a_time():
        with session.ending.failing_closes():
            session.stages.finish_submitted()
            try:
                session.agree(Operation.close, session.num_train_steps, Announcement)
                if session.stages.joint_updates.need_later_batches:
                    session.drain()
            except StageError as error:
                if error.discarded is None:
                    raise
                discarded = error
            session.ending.finish_submitted()
            session.control.agree(Operation.close, session.num_train_steps, Announcement)
        session.ending.end(RuntimeError("close() was called"))
    if discarded is not None:
        raise discarded
