"""Makes updates wait until no stage can fail in their batch."""

from __future__ import annotations

from collections.abc import Sequence

from ..ranks.agreement import Announcement, Operation
from ..runtime.comm_hook import check_hooks
from ..runtime.session import Session


def let_updates_wait(session: Session, kinds: Sequence[str | None], *, has_norm: bool) -> None:
    """Makes updates wait for all stages where their gradients have a buffer to wait in.

    Where there is a spare buffer, where all buffers take turns, or where they wait for a norm
    anyway; or where the stages wait for the update. Every rank calls it, drained.

    Args:
        kinds: the fused pass of each optimizer; None: its own step.

    Raises:
        ValueError: a gradient hook needs that they wait, and they cannot.
    """
    engines = [stage.weights.engine for stage in session.stages]
    has_spare = session.stages.options.spare_buffer
    mine = (
        has_norm
        or has_spare
        or all(
            engine.num_versions == 1
            or engine.frees_gradients
            or (None not in kinds and engine.num_slots > engine.num_versions)
            for engine in engines
        )
    )
    with session.ending.failing_closes():
        announced = session.agree(
            Operation.new_optimizer, session.num_train_steps, lambda: Announcement(training=mine)
        )
    session.stages.let_updates_wait(waiting_is_free=all(each.training for each in announced))
    check_hooks(session)
