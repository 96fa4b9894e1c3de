"""One evaluation: the first pipeline's forwards, without gradients."""

from __future__ import annotations

from typing import Any

from .. import _C
from ..ranks.operations import Operation
from .given import Call
from .microbatch import join_outputs
from .session import Session


def evaluate(session: Session, call: Call, *, is_train: bool) -> Any:
    """Gives the output, of ready-made microbatches a list, where the last stage is. Drains.

    Every rank calls it.

    Args:
        is_train: whether the modules are in train mode.
    """
    session.ending.check_open()
    with session.ending.failing_closes():
        given, microbatches = session.agree_on_call(
            call, lambda: None, Operation.evaluation, session.num_evaluations, is_train
        )
    for extension in session.extensions:
        extension.before_evaluation()
    with session.ending.failing_closes():
        mode = session.mode_in_use(is_train)
        session.drain()
        run = ~session.num_evaluations  # never a train_step's number
        session.num_evaluations += 1
        stages = session.stages.of_first_pipeline()
        # If it fails it is discarded alone: as a batch after all that have begun.
        batch = session.accumulation.num_updates + 1
        with session.interruptible_later():
            for stage in stages:
                inputs = session.intake.inputs(given, stage, mode, microbatches)
                stage.runner.begin(run, inputs)
            session.stages.submit_evaluation(
                _C.Run(id=run, wiring=mode.wiring, layouts=microbatches.layouts, batch=batch)
            )
        session.drain()
        outputs = [stage.runner.outputs_of(run) for stage in stages]
    if not session.gives_output:
        return None
    return outputs[-1] if call.is_list else join_outputs(outputs[-1], microbatches.sizes)
