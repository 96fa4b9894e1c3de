"""The stages that this process runs, with their engine: executors, channels, losses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..model.hooks import LateHooks
from ..model.metrics import Metric
from ..model.precision import Precision
from ..model.replacing import return_freed_memory
from ..ranks.agreement import ControlPlane
from ..ranks.channels import Channels
from ..ranks.grid import RankGrid
from ..stages.compile import compiled
from ..stages.modes import Mode
from ..stages.tied import find_ties
from .accumulation import BatchPart
from .released import OtherStages
from .runner import BoundProgram, StageRunner
from .stage_weights import StagePart, StageState, share_out, take_over
from .tied_copies import Ties


@dataclasses.dataclass
class LocalStage:
    """One of the stages that this process runs."""

    index: int
    device: torch.device
    state: StageState
    runner: StageRunner
    executor: _C.Executor  # of the rank, which may have several stages
    bound: dict[int, BoundProgram] = dataclasses.field(default_factory=dict)  # by wiring


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
        metrics: Mapping[str, Metric],
        compile_options: Mapping[str, Any],
        recompute: Sequence[bool],
        recomputes_blocks: bool,
        bucket_bytes: int,
        precision: Precision,
        warmup_batches: int,
        timeout: float,
    ) -> None:
        d = schedule.depth
        # A copy of a stage is where the stage of the first pipeline is that shares its rank.
        placed = dict(zip(schedule.placement[:d], devices, strict=True))
        devices = [
            placed.get(rank, devices[stage % d]) for stage, rank in enumerate(schedule.placement)
        ]
        in_flight = [schedule.max_in_flight(stage) for stage in range(schedule.num_stages)]
        self._root = root
        self._compile_options = compile_options
        self._late_hooks: dict[int, LateHooks] = {}  # by wiring
        self._grid = grid
        self._channels = Channels(grid, devices, in_flight, timeout)
        self.losses = _C.LossBoard(
            fault=fault,
            group="" if control.group is None else control.group.group_name,
            shared=control.board,
            ranks=[grid.process_of(stage) for stage in range(schedule.num_stages)],
            replica=grid.replica,
            num_replicas=grid.width,
            num_pipelines=schedule.num_pipelines,
            num_numbers=1 + len(metrics),
        )
        has_copies = schedule.num_pipelines > 1 and not grid.in_processes
        sums = [_C.CopySum() if has_copies else None for _ in range(d)]
        ties = find_ties(mode.programs)
        tied = {name: tie.stages for tie in ties for name in tie.names}
        states = share_out(
            root,
            [
                StagePart(
                    index=stage,
                    pipeline=grid.pipeline(stage),
                    program=mode.programs[stage % d],
                    device=devices[stage],
                    num_versions=schedule.num_versions[stage],
                    group=grid.replica_group(stage),
                    bucket_bytes=bucket_bytes,
                    first=grid.process_of(stage % d, replica=0),
                    copies=sums[stage % d],
                    tied=tied,
                    precision=precision,
                )
                for stage in grid.stages
            ],
        )
        self._ties = Ties(ties, grid, states)
        kept = [*root.buffers(), *(tensor for state in states for tensor in state.parameters())]
        self.others = OtherStages(root, kept) if grid.in_processes else None
        return_freed_memory()  # the model's, whose weights are in the stages' buffers now
        runners = {
            state.index: StageRunner(
                state.index % d,
                d,
                loss_fn,
                metrics,
                state.device,
                state.storage_pointers,
                state.replayed_places,
                list(state.frozen.values()),
                precision,
                recompute=recompute[state.index % d],
            )
            for state in states
        }
        state_of = {state.index: state for state in states}
        self._stages: list[LocalStage] = []
        self._executors: list[_C.Executor] = []
        self._in_update_order: list[LocalStage] = []
        seed = _C.draw_seed() if any(recompute) or recomputes_blocks else 0
        threads = torch.get_num_threads()
        for rank in grid.local_ranks:
            executor = _C.Executor(
                schedule=schedule,
                rank=rank,
                replica=grid.replica,
                num_replicas=grid.width,
                # The ranks of one process share its cores.
                num_threads=0 if grid.in_processes else max(1, threads // len(grid.local_ranks)),
                seed=seed,
                warmup_batches=warmup_batches,
                stages=[
                    (
                        stage,
                        state_of[stage].engine,
                        runners[stage].forward_while_alive(),
                        recompute[stage % d],
                        recomputes_blocks,
                    )
                    for stage in grid.stages_of(rank)
                ],
                fault=fault,
                losses=self.losses,
            )
            self._executors.append(executor)
            here = {
                i: LocalStage(i, devices[i], state_of[i], runners[i], executor)
                for i in grid.stages_of(rank)
            }
            self._stages += here.values()
            self._in_update_order += (here[i] for i in schedule.update_order(rank))
        self._stages.sort(key=lambda stage: stage.index)
        self._tickets: list[list[int]] = []  # of the unfinished batches, one for each executor
        torch.set_num_threads(threads)  # setting a thread's number sets the default of new ones
        # Nothing here refers to `self`, or to a runner, whose loss_fn may refer to the pipeline.
        self.end = weakref.finalize(
            self,
            _end_engine,
            self._executors,
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
        d = self._grid.depth
        firsts = range(0, self._grid.num_stages, d)
        channels.make([(first + a, first + b) for first in firsts for a, b in mode.edges()])
        clones = {id(clone): clone for stage in self._stages for clone in stage.state.clones}
        self._late_hooks[mode.wiring] = LateHooks(
            self._root, clones.values(), mode.captured.graph, compiled=bool(self._compile_options)
        )
        for stage in self._stages:
            here = stage.index
            program = mode.programs[here % d]
            functions = stage.state.bind(program)
            stage.bound[mode.wiring] = BoundProgram.of(
                program, [compiled(function, self._compile_options) for function in functions]
            )
            first = here - here % d
            producers = [first + producer for producer in sorted(program.receives)]
            consumers = [first + consumer for consumer in sorted(program.sends)]
            stage.executor.set_wiring(
                here,
                mode.wiring,
                [
                    (producer, channels.receiver(producer, here), channels.sender(here, producer))
                    for producer in producers
                ],
                [
                    (consumer, channels.sender(here, consumer), channels.receiver(consumer, here))
                    for consumer in consumers
                ],
            )

    def check_before_batch(self, mode: Mode, *, training: bool) -> None:
        """Raises ValueError if the model was changed in a way that the stages cannot follow."""
        self._late_hooks[mode.wiring].check()
        for stage in self._stages if training else ():
            stage.state.check_requires_grad()

    def of_first_pipeline(self) -> list[LocalStage]:
        """Those that evaluate, and whose buffers are the model's."""
        return [stage for stage in self._stages if self._grid.pipeline(stage.index) == 0]

    def restart_delay(self, *, replicas_too: bool = False) -> None:
        """After weights were loaded: all copies get them, older versions are gone.

        Args:
            replicas_too: they may have loaded what is their own, unless loading failed.
        """
        self._ties.take_over()
        if self._grid.num_pipelines > 1 or replicas_too:
            take_over([stage.state for stage in self._stages], self._grid.replica_group)
        else:
            for stage in self._stages:
                stage.state.engine.restart_delay()

    def submit_batch(
        self, run: int, wiring: int, layouts: Sequence[int], rows: Sequence[int], part: BatchPart
    ) -> None:
        """``rows``: of each microbatch, none if losses are sums."""
        self._tickets.append(
            [
                executor.submit_batch(run, wiring, layouts, rows, *part)
                for executor in self._executors
            ]
        )

    def submit_evaluation(self, run: int, wiring: int, layouts: Sequence[int]) -> None:
        for executor in self._executors:
            executor.submit_evaluation(run, wiring, layouts)

    def in_update_order(self) -> Iterator[LocalStage]:
        """The stages, those of a rank in the order in which the schedule updates them."""
        return iter(self._in_update_order)

    def record(self, on: bool) -> None:
        """Whether executed actions are recorded."""
        for executor in self._executors:
            executor.record(on)

    def take_records(self) -> list[tuple[int, str, int, int, int, float, float]]:
        """The recorded actions: stage, kind, batch, microbatch, version, start, end."""
        return [action for executor in self._executors for action in executor.take_record()]

    def wait_for_room(self, max_unfinished: int) -> None:
        """Waits until fewer than ``max_unfinished`` batches are unfinished."""
        while len(self._tickets) >= max_unfinished:
            self._wait_for(self._tickets.pop(0))

    def drain(self) -> None:
        """Runs the schedule's epilogue on every stage and waits for it."""
        for executor in self._executors:
            executor.submit_drain()
        self.finish_submitted()
        self._tickets.clear()

    def finish_submitted(self) -> None:
        """Waits until everything submitted so far has been executed."""
        self._wait_for([executor.last_ticket for executor in self._executors])

    def _wait_for(self, tickets: Sequence[int]) -> None:
        for executor, ticket in zip(self._executors, tickets, strict=True):
            executor.wait(ticket)

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
