"""The stages that this process runs, with their engine: executors, channels, losses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import _C
from .control import ControlPlane
from .heap import return_freed_memory
from .modes import Mode
from .runner import BoundProgram, StageRunner
from .stage_state import OtherStages, StageState, share_out
from .wiring import Channels, RankGrid


@dataclasses.dataclass
class LocalStage:
    """One of the stages that this process runs."""

    index: int
    device: torch.device
    state: StageState
    runner: StageRunner
    executor: _C.Executor
    bound: dict[int, BoundProgram] = dataclasses.field(default_factory=dict)  # by wiring
    tickets: list[int] = dataclasses.field(default_factory=list)  # of the unfinished batches


class LocalStages:
    """Takes the model over and runs this process's stages.

    ``end()`` ends the threads and the connections; it is called by itself when nobody refers to
    this object any more.
    """

    def __init__(
        self,
        root: nn.Module,
        mode: Mode,
        schedule: _C.Schedule,
        grid: RankGrid,
        devices: Sequence[torch.device],
        control: ControlPlane,
        fault: _C.Fault,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        timeout: float,
    ) -> None:
        d = schedule.num_stages
        in_flight = [schedule.max_in_flight(stage) for stage in range(d)]
        self._channels = Channels(grid, devices, in_flight, timeout)
        self.losses = _C.LossBoard(
            fault=fault,
            group="" if control.group is None else control.group.group_name,
            ranks=[grid.rank_of(stage) for stage in range(d)],
            replica=grid.replica,
            num_replicas=grid.width,
        )
        states = share_out(
            root,
            [mode.programs[stage] for stage in grid.stages],
            [devices[stage] for stage in grid.stages],
            [schedule.num_versions[stage] for stage in grid.stages],
            grid.replica_group(),
        )
        kept = [*root.buffers(), *(tensor for state in states for tensor in state.parameters())]
        self.others = OtherStages(root, kept) if grid.in_processes else None
        return_freed_memory()  # the model's, whose weights are in the stages' buffers now
        self._stages: list[LocalStage] = []
        threads = torch.get_num_threads()
        for state in states:
            runner = StageRunner(state.index, d, loss_fn, state.storage_pointers)
            executor = _C.Executor(
                schedule=schedule,
                stage=state.index,
                replica=grid.replica,
                num_replicas=grid.width,
                # The stages of one process share its cores.
                num_threads=0 if grid.in_processes else max(1, threads // d),
                state=state.engine,
                fault=fault,
                losses=self.losses,
                forward=runner.forward_while_alive(),
            )
            stage = LocalStage(state.index, devices[state.index], state, runner, executor)
            self._stages.append(stage)
        torch.set_num_threads(threads)  # setting a thread's number sets the default of new ones
        # Nothing here refers to `self`, or to a runner, whose loss_fn may refer to the pipeline.
        self.end = weakref.finalize(
            self,
            _end_engine,
            [stage.executor for stage in self._stages],
            [stage.runner.thread for stage in self._stages],
            self.losses,
            self._channels,
            control,
            grid,
            fault,
        )
        self.end.atexit = False
        self.connect(mode)

    def __getitem__(self, position: int) -> LocalStage:
        return self._stages[position]

    def __iter__(self) -> Iterator[LocalStage]:
        return iter(self._stages)

    def connect(self, mode: Mode) -> None:
        """Gives the stages the mode's functions and channels. Every rank calls it."""
        channels = self._channels
        channels.make(mode.edges())
        for stage in self._stages:
            program = mode.programs[stage.index]
            stage.bound[mode.wiring] = BoundProgram.of(program, stage.state.bind(program))
            here = stage.index
            stage.executor.set_wiring(
                mode.wiring,
                [
                    (producer, channels.receiver(producer, here), channels.sender(here, producer))
                    for producer in sorted(program.receives)
                ],
                [
                    (consumer, channels.sender(here, consumer), channels.receiver(consumer, here))
                    for consumer in sorted(program.sends)
                ],
            )

    def wait_for_room(self, max_unfinished: int) -> None:
        """Waits until fewer than ``max_unfinished`` batches are unfinished."""
        for stage in self._stages:
            while len(stage.tickets) >= max_unfinished:
                stage.executor.wait(stage.tickets.pop(0))

    def drain(self) -> None:
        """Runs the schedule's epilogue on every stage and waits for it."""
        for stage in self._stages:
            stage.executor.submit_drain()
        self.finish_submitted()
        for stage in self._stages:
            stage.tickets.clear()

    def finish_submitted(self) -> None:
        """Waits until everything submitted so far has been executed."""
        for stage in self._stages:
            stage.executor.wait(stage.executor.last_ticket)

    def first_error(self) -> BaseException | None:
        """The exception that the model's own code raised, if it did."""
        errors = (stage.runner.error for stage in self._stages)
        return next((error for error in errors if error is not None), None)


def _end_engine(
    executors: list[_C.Executor],
    threads: list[list[int]],
    losses: _C.LossBoard,
    channels: Channels,
    control: ControlPlane,
    grid: RankGrid,
    fault: _C.Fault,
) -> None:
    """Ends a pipeline's threads and connections."""
    if [threading.get_ident()] in threads:
        # The garbage collector runs in any thread, also in one that is to be ended here.
        arguments: tuple[object, ...] = (executors, [], losses, channels, control, grid, fault)
        threading.Thread(target=_end_engine, args=arguments).start()
        return
    with contextlib.ExitStack() as steps:  # last one first; all of them, even if one is interrupted
        # Ends waiting for a loss that will never exist.
        steps.callback(fault.raise_, "the pipeline was closed")
        # The engine lets go of the groups after Python has, and so frees them without Python's
        # lock, which their threads may need to end.
        for executor in executors:
            steps.callback(executor.drop_connections)
        steps.callback(losses.close)
        steps.callback(channels.close)
        steps.callback(grid.close)
        steps.callback(control.close)
        for executor in executors:
            steps.callback(executor.close)
