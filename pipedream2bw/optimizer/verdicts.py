"""Makes updates wait until no stage can fail in their batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ..ranks.operations import Operation, UpdatesMayWait
from ..runtime.comm_hook import check_hooks
from ..runtime.session import Session


def let_updates_wait(session: Session, kinds: Sequence[str | None], *, has_norm: bool) -> None:
    """Makes updates wait for all stages where that takes neither time nor memory.

    Under a schedule of one delay it takes no time. It takes no memory where the gradients have a
    buffer to wait in: where all buffers take turns, or where the stages wait for the update. With a
    norm they wait anyway. Every rank calls it, drained.

    Args:
        kinds: the fused pass of each optimizer; None: its own step.

    Raises:
        ValueError: a gradient hook needs it, and the schedule could not go on.
    """
    engines = [stage.weights.engine for stage in session.stages]
    is_free = session.schedule.has_one_delay and all(
        engine.num_versions == 1
        or engine.frees_gradients
        or (None not in kinds and engine.num_slots > engine.num_versions)
        for engine in engines
    )
    mine = has_norm or is_free
    with session.ending.failing_closes():
        announced = session.agree(
            Operation.new_optimizer, session.num_train_steps, lambda: UpdatesMayWait(mine)
        )
        with contextlib.suppress(ValueError):  # then some failures end the pipeline
            session.stages.let_updates_wait(all(each.can for each in announced))
    check_hooks(session)
