"""What Python keeps for a pipeline's engine, and how the engine ends."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _C
from ..errors import StageError
from ..ranks.agreement import ControlPlane
from ..ranks.channels import Channels
from ..ranks.grid import RankGrid


class KeptErrors(list[BaseException]):
    """Exceptions that the stages' Python code raised; the engine knows their positions.

    Their tracebacks may refer to the pipeline: held by the engine they would keep it alive.
    """


def keeping(errors: weakref.ref[KeptErrors]) -> Callable[[BaseException], int]:
    """Keeps an error for the engine, and gives its position: -1 once the pipeline is gone."""

    def keep(error: BaseException) -> int:
        kept = errors()
        if kept is None:
            return -1
        kept.append(error)
        return len(kept) - 1

    return keep


def end_engine(
    executors: list[_C.Executor],
    threads: list[list[int]],
    losses: _C.LossBoard,
    verdicts: _C.BatchVerdicts,
    channels: Channels,
    control: ControlPlane,
    grid: RankGrid,
    unfinished: list[list[int]],
    guarded: list[tuple[RemovableHandle, nn.Parameter]],
) -> None:
    """Ends a pipeline's threads and connections; warns of train_steps that are lost with it.

    Args:
        guarded: the guards of the model's Parameters, which may be another pipeline's after this.
    """
    if unfinished and not control.fault.raised:
        unfinished.clear()
        warnings.warn(
            "a pipeline was dropped before its last train_steps were finished: the model lacks "
            "their updates. Call flush() or close() before, or use `with PipelineModule(...)`",
            stacklevel=2,
        )
    if [threading.get_ident()] in threads:
        # The garbage collector runs in any thread, also in one that is to be ended here.
        parts = (losses, verdicts, channels, control, grid, unfinished, guarded)
        threading.Thread(target=end_engine, args=(executors, [], *parts)).start()
        return
    with contextlib.ExitStack() as steps:  # last one first; all of them, even if one is interrupted
        for guard, parameter in guarded:
            steps.callback(setattr, parameter, "grad", None)
            steps.callback(guard.remove)
        # Ends waiting for a loss that will never exist.
        reason = "the pipeline was closed"
        steps.callback(control.fault.raise_, StageError(reason, cause=reason))
        # The engine drops the groups after Python has, and so frees them without Python's
        # lock, which their threads may need to end.
        for executor in executors:
            steps.callback(executor.drop_connections)
        steps.callback(verdicts.drop_connections)
        steps.callback(losses.close)
        steps.callback(channels.close)
        steps.callback(grid.close)
        steps.callback(control.close)
        for executor in executors:
            steps.callback(executor.close)
