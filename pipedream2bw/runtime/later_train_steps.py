"""What must happen before a number of an earlier train_step exists."""

from __future__ import annotations

import itertools

from ..ranks.operations import Announcement, Operation
from .session import Session


def finish_forwards(session: Session, train_step: int) -> None:
    """Drains if the train_step's loss would come during a later one's actions alone.

    The other ranks drain with this one, whatever they call next.
    """
    behind = session.schedule.forward_batches_behind
    is_late = train_step + behind >= session.num_train_steps
    if behind and is_late and session.first_unfinished is not None:
        session.ending.check_open()
        with session.ending.failing_closes():
            session.agree(Operation.read_loss, train_step, Announcement)


def train_steps_until_finished(session: Session, train_step: int) -> int:
    """How many more train_steps the last backward of one of them needs, on every stage."""
    if session.first_unfinished is None:
        return 0
    return train_step + session.schedule.most_batches_behind + 1 - session.num_train_steps


def train_steps_until_loss(session: Session, train_step: int) -> int:
    """How many more train_steps the loss of one of them needs.

    None, but where stages read different versions and make their updates together: there a forward
    may wait for an earlier batch's backward on a stage that does it later.
    """
    first, delay = session.first_unfinished, session.schedule.delay
    if first is None or session.schedule.has_one_delay:
        return 0
    needed = train_step
    for stages in session.stages.joint_updates:
        for stage, other in itertools.product(stages, repeat=2):
            batch_before = train_step - delay[stage] - 1
            if batch_before >= first:
                needed = max(needed, batch_before + delay[other])
    return needed + 1 - session.num_train_steps
