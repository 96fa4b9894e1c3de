"""Loading weights into an open pipeline, and going on from another run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.checkpoint import Checkpoint
from ..ranks.operations import Operation
from .discard_batch import discard_batch
from .session import Session
from .stage_values import take_over


def flush_to_load(session: Session, operation: Operation) -> None:
    """Agrees on an operation that loads weights, and drains. Every rank calls it."""
    session.ending.check_open()
    session.accumulation.check_weights_are_own("loading weights")
    if operation == Operation.load:
        discard_batch(session)  # whose step will never come: another run goes on
    session.flush_for(operation)

    def before_load() -> None:
        for extension in session.extensions:
            extension.before_load(session.control.timeout / 2)

    session.together(before_load)


def load_model(session: Session, opened: Callable[[], Checkpoint], *, strict: bool) -> Any:
    """Loads this process's part of a checkpoint into every weight version. Drains."""
    flush_to_load(session, Operation.load_state_dict)
    has_failed = True
    try:
        result = session.together(lambda: session.local_model.load(opened(), strict))
        has_failed = False
    finally:  # some may have loaded a part before they found an error
        if not session.control.fault.raised:
            stages = session.stages
            with session.ending.lost_ranks_close():  # copies get the values, older ones are gone
                if stages.ties is not None:
                    stages.ties.take_over()
                # Replicas may have loaded what is their own, unless loading failed.
                if stages.grid.num_pipelines > 1 or has_failed:
                    take_over([stage.weights for stage in stages], stages.grid)
                else:
                    for stage in stages:
                        stage.weights.engine.restart_delay()
    weights_loaded(session)
    return result


def weights_loaded(session: Session) -> None:
    """Tells the extensions that this process's weights have been loaded."""
    for extension in session.extensions:
        extension.weights_loaded()


def go_on_from(
    session: Session, *, train_steps: int, updates: int, random_seed: int | None
) -> None:
    """Counts on from a run's so many train_steps and optimizer steps. Drained.

    Training draws what that run would have drawn next, if both draw by key.
    """
    session.num_train_steps = session.ending.batch = train_steps
    session.accumulation.go_on_from(updates)
    session.discarding.count_anew()
    if random_seed is not None and session.random_seed is not None:
        session.random_seed = random_seed
