"""Calls of the extension that mypy has to refuse.

`make lint` checks this file with mypy, which warns of a comment that ignores nothing: so it fails
if one of these calls is taken.
"""

from __future__ import annotations

from collections.abc import Callable

from pipedream2bw import _C


def wrong_calls(
    stage: _C.Stage, executor: _C.Executor, forward: Callable[[int], _C.ForwardResult]
) -> None:
    _C.make_schedule("2bw", 2.0, 4)  # type: ignore[arg-type]
    _C.make_schedule("2bw", 2, 4, ranks=2)  # type: ignore[call-arg]
    _C.Run(id=1, seed="0")  # type: ignore[arg-type]
    _C.StageSetup(index=0, stage=stage, forward=forward, recompute=False)  # type: ignore[arg-type]
    _C.ForwardResult(loss=1.0)  # type: ignore[arg-type]
    _C.Message([], b"")  # type: ignore[arg-type]
    stage.settle(None)  # type: ignore[arg-type]
    stage.kept_step(0).zero_()  # type: ignore[union-attr]
    stage.set_step_count(0, count=None)  # type: ignore[arg-type]
    executor.submit_run(1)  # type: ignore[arg-type]
    executor.submit_copy(stage=0, version=0, copy=forward)  # type: ignore[arg-type]
    executor.last_ticket = 0  # type: ignore[misc]
