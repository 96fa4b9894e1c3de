"""What a script changes of its model between two batches, followed by the stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..model.clone import copy_attributes
from ..model.hooks import called_by
from ..model.watch import Watch
from ..stages.modes import Mode, Modes
from .local_stages import LocalStages

_MOST_MODES = 16
_MANY_CAPTURES = 8


class ModelChanges:
    """Keeps the stages' copies of modules, and their programs, as the model is.

    A mode is the capture of one state of what the model's code reads: modules' train and eval
    modes, numbers. It is kept for the next time that the model is in this state.
    """

    def __init__(self, modes: Modes, stages: LocalStages) -> None:
        options = stages.options
        functions = {"loss_fn": options.loss_fn, **options.metrics}
        self._first = modes.first
        self._stages = stages
        captured, found = self._first.captured, self._first.captured.found
        self._watch = Watch(
            stages.root,
            functions.items(),
            found.written_buffers - found.guessed_buffers,
            () if options.compile_options else called_by(captured.graph, stages.root),
            is_recorded=bool(options.pipeline.graphs),
            is_compiled=bool(options.compile_options),
        )
        self._modes: dict[object, Mode] = {self._watch.state: self._first}
        self._num_followed = self._num_captures = 0
        self._has_changed = False

    def look(self, *, running: bool) -> None:
        """Looks at what the script has done since the last time, see :meth:`Watch.look`."""
        self._stages.check_written(running=running)
        self._has_changed = self._watch.look(running=running)

    def look_late(self) -> None:
        """Before a drain: raises ValueError if what is being computed has changed meanwhile."""
        self._stages.check_written(running=True)
        self._watch.look_late()

    @property
    def digest(self) -> int:
        """A number that ranks have in common if the script has done the same on all of them."""
        return (self._watch.digest << 16) + self._num_followed % 2**15 * 2 + self._has_changed

    def follow(self, drain: Callable[[], None], capture: Callable[[], Mode]) -> Mode:
        """Makes the stages follow what has changed, and gives the mode. Every rank calls it.

        Args:
            drain: finishes what was submitted.
            capture: captures the model as it is now, on all ranks.
        """
        if not self._has_changed:
            return self._modes.get(self._watch.state, self._first)
        # What is under way is computed as it began. Modes may differ in their wiring. And torch.fx
        # traces by replacing nn.Module's call for all threads.
        drain()
        state = self._watch.state
        if state not in self._modes:
            mode = capture()
            self._stages.connect(mode)
            self._modes[state] = mode
            self._num_captures += 1
            self._warn_of_many()
            if len(self._modes) > _MOST_MODES:  # the first one's parameters are the stages'
                del self._modes[list(self._modes)[1]]
        changed = self._watch.follow()
        for stage in self._stages:
            for clone in stage.weights.clones:
                copy_attributes(stage.weights.model, clone, changed)
        self._num_followed += 1
        self._has_changed = False
        return self._modes[state]

    def _warn_of_many(self) -> None:
        if self._num_captures == _MANY_CAPTURES:
            warnings.warn(
                f"the model has been captured again {_MANY_CAPTURES} times, because what its code "
                f"reads was changed: {', '.join(self._watch.names_of_changes()[:3])}. Each capture "
                "takes time. Give the model such a value as an argument, or keep it in a buffer",
                stacklevel=2,
            )
