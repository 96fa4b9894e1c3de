"""An open pipeline: this process's stages at work, and what all ranks do together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from torch import nn

from .. import _C
from ..errors import reworded
from ..model.local_shards import as_dtensors, parameter_at, shard_dimensions
from ..ranks.agreement import DrainWanted
from ..ranks.operations import Announcement, Operation
from ..stages.modes import Mode, Modes
from .accumulation import Accumulation, BatchPart, check_same_part
from .contexts import Contexts
from .discarding import Discarding
from .ending import Ending
from .extension import Extensions
from .intake import Intake
from .local_model import LocalModel
from .local_stages import LocalStages, interrupts_later, last_uncaught
from .model_changes import ModelChanges
from .step_data import Microbatches, StepArguments, StepData

_Made = TypeVar("_Made")
_Row = TypeVar("_Row", bound=tuple[int, ...])


class Session:
    """This process's part of an open pipeline; it ends when nobody refers to it any more.

    Every rank calls a method that agrees, submits or drains.

    Args:
        model: what the caller gave, a module or a list of modules.
        modes: its captures, one of which has been made.
        stages: those of this process, which have taken the model over.
        without_values: names of parameters and buffers that are to be loaded.
        random_seed: of what training draws, the same on all ranks; None: torch's own numbers.

    Attributes:
        model, modes, stages: as given. root: the model as one module.
        random_seed: may be changed between train_steps, on all ranks. A run that begins with the
            seed and ``num_train_steps`` of another one draws what that one would have drawn next.
        grid: which process runs which stages.
        accumulation: which train_steps make one batch.
        control: how all ranks agree; it has the fault that ends all waiting, and the timeout.
        local_model: this process's parameters, buffers and state.
        ending: whether the pipeline is open, and what has ended it.
        num_train_steps: calls of :meth:`train_step` so far, the number of the next one.
        extensions: what hangs on the pipeline.
        first_unfinished: the number of the first train_step since the last drain; None: drained.
        discarding: takes back the batches in which the user's code fails.
        intake: splits what the calls are given.
        changes: what scripts do to the model, followed by the stages.
        num_evaluations: so far, the number of the next one.
        uncaught_before: what nobody had caught when the last train_step was submitted.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Sequence[nn.Module],
        modes: Modes,
        stages: LocalStages,
        without_values: Collection[str] = (),
        random_seed: int | None = None,
    ) -> None:
        self.model = model
        self.random_seed = random_seed
        self.modes = modes
        self.stages = stages
        self.accumulation = Accumulation(stages.options, stages.grid.width)
        self.root = stages.root
        self.grid = stages.grid
        self.control = stages.control
        self.extensions = Extensions()
        self.local_model = LocalModel(stages, modes.first, self.extensions, without_values)
        self.ending = Ending(stages)
        devices = {device.type for device in stages.options.devices}
        self._contexts = Contexts(stages.options.precision, devices)
        self.num_train_steps = 0
        self.discarding = Discarding(stages, self.accumulation, self.extensions)
        self.uncaught_before = last_uncaught()
        self.num_evaluations = 0
        self.intake = Intake(stages)
        self.first_unfinished: int | None = None
        self.changes = ModelChanges(modes, stages)
        self._has_updated = False  # since the last drain
        _all.add(self)

    @property
    def schedule(self) -> _C.Schedule:
        """What the stages do in which order."""
        return self.stages.schedule

    @property
    def has_fresh_forwards(self) -> bool:
        """Whether some forwards alone are late, or will be when updates have been measured."""
        return self.stages.options.update_slots is not None or self.schedule.has_fresh_forwards

    @property
    def facts(self) -> dict[str, Any]:
        """What rules name: the constructor's options, and what has come of them."""
        return {
            **vars(self.stages.options.pipeline),
            "schedule": self.schedule,
            "fresh forwards": self.has_fresh_forwards,
            "num_stages": self.schedule.depth,
            "width": self.grid.width,
            "devices of the stages": self.stages.options.devices,
            "'tp' of the mesh": self.grid.num_shards,
            "shards": shard_dimensions(self.root),
            "shard_state": any(stage.weights.engine.is_shared for stage in self.stages),
        }

    # ------------------------------------------------------------------ running

    def train_step(self, arguments: StepArguments) -> _C.AwaitedNumbers:
        """Submits forward and backward of the microbatches; gives the place of its loss."""
        self.ending.check_open()
        with self.ending.failing_closes():
            # The train_steps that the schedule keeps unfinished, and one to go on with.
            self.stages.wait_for_room(max(2, self.schedule.most_batches_behind + 1))
            number = self.num_train_steps
            data, microbatches = self.agree_on_call(
                arguments, self.accumulation.next, Operation.train_step, number
            )
            mode = self.mode_in_use()
            with self.interruptible_later():
                slot = self._submit(data, mode, microbatches)
                self.uncaught_before = last_uncaught()
            return slot

    def _submit(self, data: StepData, mode: Mode, microbatches: Microbatches) -> _C.AwaitedNumbers:
        number, part = self.num_train_steps, data.part
        assert part is not None
        slot = self.stages.losses.expect(number)
        self.discarding.begin(part, number)
        for stage in self.stages:
            inputs = self.intake.inputs(data, stage, mode, microbatches)
            stage.runner.begin(number, inputs)
        self.stages.submit_train_step(
            _C.Run(
                id=number,
                wiring=mode.wiring,
                layouts=microbatches.layouts,
                loss_weights=microbatches.loss_weights,
                batch=part.batch,
                begins_batch=part.begins,
                ends_batch=part.ends,
                num_averaged=part.num_averaged,
                replica_weight=part.replica_weight,
                first_microbatch=microbatches.first,
                seed=self.random_seed,
            )
        )
        self.accumulation.take(part)
        if self.first_unfinished is None:
            self.first_unfinished = number
        self.num_train_steps += 1
        self.ending.batch = self.num_train_steps
        return slot

    @property
    def _is_running(self) -> bool:
        """Whether batches or updates may be being computed."""
        return self._has_updated or self.first_unfinished is not None

    def interruptible_later(self) -> contextlib.AbstractContextManager[None]:
        """With several processes an interrupt ends the pipeline, whatever has been done."""
        return contextlib.nullcontext() if self.grid.in_processes else interrupts_later()

    @property
    def gives_output(self) -> bool:
        """Whether this process has the last stage that evaluates: the first pipeline's."""
        return self.grid.depth - 1 in self.grid.stages

    def agree_on_call(
        self,
        arguments: StepArguments,
        part: Callable[[], BatchPart | None],
        operation: Operation,
        number: int,
    ) -> tuple[StepData, Microbatches]:
        """Checks a call here, and with all ranks what it is split into."""
        data = StepData(part=None)

        def check() -> Announcement:
            nonlocal data
            of_batch = part()
            self._contexts.check(training=of_batch is not None)
            self.local_model.check_values()
            self.changes.look(running=self._is_running)
            if of_batch is not None:
                self.stages.check_requires_grad()
            is_train = self.root.training
            data = self.intake.take(arguments, of_batch, self.modes.first, is_train=is_train)
            mine = data.announcement._replace(model=self.changes.digest)
            for extension in self.extensions:
                mine = extension.announce(mine)
            return mine

        announced = self.agree(operation, number, check)
        check_same_part(announced)
        for extension in self.extensions:
            extension.announced(announced)
        are_listed = any(rank.is_list > 0 for rank in announced)
        listed = self.control.told_by_all(data.listed) if are_listed else []
        return data, self.intake.microbatches(announced, listed, data.part)

    def mode_in_use(self) -> Mode:
        """The capture of the model as it is; made when first used, on all ranks together."""
        return self.changes.follow(self.drain, lambda: self.control.together(self._capture))

    def _capture(self) -> Mode:
        others = self.stages.others
        with others.in_place() if others else contextlib.nullcontext():
            return self.modes.capture()

    def agree(self, operation: Operation, number: int, local: Callable[[], _Row]) -> list[_Row]:
        """Agrees with all ranks as :meth:`ControlPlane.agree` does.

        Raises:
            StageError: on every rank: a batch was discarded, and has been taken back now.
        """
        try:
            return self.control.agree(operation, number, local)
        except DrainWanted:
            self.drain()  # raises if a batch is discarded
        return [] if operation == Operation.read_loss else self.agree(operation, number, local)

    # ------------------------------------------------------------------ draining, taking back

    def _take_back(self, batch: int) -> NoReturn:
        """Makes as if the batch and all later ones had not been, and raises why; drained."""
        with self.interruptible_later():
            taken, original = self.discarding.take_back(batch, self.num_train_steps)
            self.num_train_steps = self.ending.batch = taken.train_step
            self._show()
        # Another object than the one that is kept, which would keep what its traceback refers to.
        error = reworded(taken.error, str(taken.error))
        raise error from (original if original is not None else taken.error.__cause__)

    def drain(self) -> None:
        """Finishes what was submitted on every stage; the model's Parameters show the newest.

        Every rank calls it. StageError if a batch was discarded: it has been taken back.
        """
        self.stages.drain()  # also of copies submitted after the last drain
        self.first_unfinished = None
        self._has_updated = False
        if (first := self.control.first_discarded()) is not None:
            self._take_back(first)
        self._show()

    def _show(self) -> None:
        for stage in self.stages:
            stage.weights.show_newest()
            stage.runner.calls.make()

    def flush_for(
        self, operation: Operation, local: Callable[[], Announcement] = Announcement
    ) -> None:
        """Agrees on an operation, as ``agree`` does, and drains: the first part of it."""
        self.ending.check_open()
        with self.ending.failing_closes():
            late: ValueError | None = None
            try:
                if self._is_running:
                    self.changes.look_late()
            except ValueError as error:
                late = error
            self.agree(operation, self.num_train_steps, local)
            self.drain()
            if late is not None:
                raise late

    def flush_to_read(self, operation: Operation) -> None:
        """As :meth:`flush_for`, but a pipeline that has ended is read as it is.

        After a failure each stage shows the newest version that it had made whole; some may be one
        ahead.
        """
        if self.ending.is_open:
            self.flush_for(operation)
        else:
            self.ending.check_readable()

    def with_dtensors(self, state: Any, prefix: str = "") -> Any:
        """State by names, nested, with shards of tensor-parallel stages as DTensors.

        Args:
            prefix: which the names have in ``state``.
        """
        parts, mesh = self.local_model.parts(), self.grid.mesh_of_shards
        if not parts or mesh is None:
            return state
        shapes = {prefix + name: parameter_at(self.root, name).shape for name in parts}
        named = {prefix + name: part for name, part in parts.items()}
        return as_dtensors(state, named, shapes, mesh)

    # ------------------------------------------------------------------ changing

    def together(self, make: Callable[[], _Made]) -> _Made:
        """Calls ``make`` on every rank; returns what it gives here, or raises on every rank."""
        with self.ending.lost_ranks_close():
            return self.control.together(make)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0, an empty list elsewhere."""
        with self.ending.lost_ranks_close():
            return self.control.gather(value)

    @contextlib.contextmanager
    def update(self) -> Iterator[int]:
        """Inside, the update of the batch that the train_step of this number ended is submitted.

        Raises:
            ValueError: no update is due.
        """
        self.ending.check_open()
        self.accumulation.check_update()
        with self.ending.failing_closes(), self.interruptible_later():
            yield self.num_train_steps - 1
            self.accumulation.num_updates += 1
            self._has_updated = True


def open_sessions() -> list[Session]:
    """The sessions of this process that have not ended."""
    return [session for session in _all if session.ending.is_open]


_all: weakref.WeakSet[Session] = weakref.WeakSet()
