"""The stages that this process runs, with their engine: executors, channels, losses."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..model.storages import OtherStages, return_freed_memory
from ..ranks.agreement import ControlPlane
from ..ranks.channels import Channels
from ..ranks.grid import RankGrid
from ..stages.compile import compiled
from ..stages.modes import Mode
from .engine_end import KeptErrors, end_engine, keeping
from .graphs import RecordingRunner, graph_setup
from .joint_updates import JointUpdates
from .runner import BoundProgram, StageOptions, StageRunner, while_alive
from .stage_values import take_over
from .stage_weights import StageSpec, StageWeights, share_out
from .tied_copies import Tie, TiedCopies, find_ties, is_trained


@dataclasses.dataclass(kw_only=True)
class LocalStage:
    """One of the stages that this process runs."""

    index: int
    weights: StageWeights
    runner: StageRunner
    executor: _C.Executor  # of the rank, which may have several stages
    bound: dict[int, BoundProgram] = dataclasses.field(default_factory=dict)  # by wiring


def is_apart_from_host(device: torch.device) -> bool:
    """Whether a stage on the device has its memory elsewhere than in the host."""
    return device.type != "cpu"


class LocalStages:
    """Takes the model over and runs this process's stages.

    ``end()`` ends the threads and the connections, the control plane's too; it is called by itself
    when nobody refers to this object any more.

    Attributes:
        losses: where the last stage's losses arrive.
        others: the stages of other processes; None in one process.
        joint_updates: which stages make their updates together.
        in_update_order: the stages, those of a rank as the schedule updates them.
        updates_wait: whether each waits until no stage can fail in its batch.
        ties: keeps copies of tied weights equal; None: there are none.
        executors: of this process's ranks.
        verdicts: of all stages on each batch.
        recorded_for: for what the executors' actions are recorded; None: they are not.
    """

    def __init__(
        self,
        *,
        root: nn.Module,
        mode: Mode,
        schedule: _C.Schedule,
        grid: RankGrid,
        control: ControlPlane,
        options: StageOptions,
    ) -> None:
        self.root = root
        self.schedule = schedule
        self.grid = grid
        self.control = control
        self.options = options
        self._errors = KeptErrors()
        self.updates_wait = False
        self.recorded_for: str | None = None
        devices = _device_of_each(schedule, options.devices)
        self._channels = Channels(
            grid,
            devices=devices,
            in_flight=[schedule.max_in_flight(stage) for stage in range(schedule.num_stages)],
            control=control.group,
            deadline=control.deadline,
        )
        most_bytes = sum(parameter.nbytes for parameter in root.parameters())
        grid.connect_replicas(devices, min(options.bucket_bytes, most_bytes))
        self.losses = _loss_board(grid, control, options, schedule)
        ties = find_ties(mode.programs)
        weights = share_out(root, self._specs(mode, devices, ties), mode.captured.found.hooked)
        take_over(weights, grid)
        self.ties = TiedCopies(ties, grid, weights) if ties else None
        kept = [*root.buffers(), *(tensor for each in weights for tensor in each.parameters())]
        self.others = OtherStages(root, kept) if grid.in_processes else None
        return_freed_memory()  # the model's, whose weights are in the stages' buffers now
        self.in_update_order = self._with_executors(weights)
        self._stages = sorted(self.in_update_order, key=lambda stage: stage.index)
        self.executors = list(dict.fromkeys(stage.executor for stage in self.in_update_order))
        on_devices = grid.in_processes and any(device.type != "cpu" for device in options.devices)
        self.joint_updates = JointUpdates(
            schedule,
            [tie.stages for tie in ties if is_trained(tie, root)],
            self.executors if on_devices else [],
        )
        self._tickets: list[list[int]] = []  # of unfinished train_steps, one for each executor
        peers = control.peers
        self.verdicts = _C.BatchVerdicts(
            num_stages=len(self._stages),
            discards=control.discards,
            group="" if peers is None else peers.verdict_group.group_name,
            shared=None if peers is None else peers.verdict_board,
        )
        # Nothing here refers to `self`, or to a runner, whose loss_fn may refer to the pipeline.
        self.end = weakref.finalize(
            self,
            end_engine,
            self.executors,
            [stage.runner.thread for stage in self._stages],
            self.losses,
            self.verdicts,
            self._channels,
            control,
            grid,
            self._tickets,
            [
                pair
                for s in self._stages
                for pair in zip(s.weights.guards, s.weights.handles, strict=True)
            ],
        )
        self.end.atexit = False
        try:
            self.connect(mode)
        except BaseException:
            self.end()
            raise

    def _specs(
        self, mode: Mode, devices: Sequence[torch.device], ties: Sequence[Tie]
    ) -> list[StageSpec]:
        schedule, grid, d = self.schedule, self.grid, self.schedule.depth
        has_copies = schedule.num_pipelines > 1 and not grid.in_processes
        sums = [_C.CopySum() if has_copies else None for _ in range(d)]
        tied = {name: tie.stages for tie in ties for name in tie.names}
        owners = collections.Counter[str]()  # of parameters and buffers, by stages that have some
        for program in mode.programs:
            names = (*program.parameters, *program.unused_parameters, *program.buffers)
            owners.update({name.rpartition(".")[0] for name in names})
        ranks = {stage: rank for rank in grid.local_ranks for stage in grid.stages_of(rank)}
        streams = {
            place: _C.StageStreams(place[1])
            for place in {(ranks[stage], devices[stage]) for stage in grid.stages}
        }
        return [
            StageSpec(
                index=stage,
                pipeline=grid.pipeline(stage),
                program=mode.programs[stage % d],
                streams=streams[ranks[stage], devices[stage]],
                num_versions=schedule.num_versions[stage],
                group=grid.replica_group(stage),
                sum_order=grid.sum_order(stage, self.options.pipeline.replica_sums),
                bucket_bytes=self.options.bucket_bytes,
                fault=grid.deadline.fault,
                copies=sums[stage % d],
                tied=tied,
                precision=self.options.precision,
                steps_on_host=self.options.optimizer_on_host and is_apart_from_host(devices[stage]),
                shared_owners=frozenset(owner for owner, count in owners.items() if count > 1),
            )
            for stage in grid.stages
        ]

    def _with_executors(self, weights: Sequence[StageWeights]) -> list[LocalStage]:
        """The stages, those of a rank in the order in which the schedule updates them."""
        schedule, grid, options, d = self.schedule, self.grid, self.options, self.schedule.depth
        weights_of = {each.index: each for each in weights}
        stages: list[LocalStage] = []
        threads = torch.get_num_threads()
        for rank in grid.local_ranks:
            here = grid.stages_of(rank)
            make = StageRunner if options.pipeline.graphs is False else RecordingRunner
            runners = {i: make(i % d, d, weights_of[i], options) for i in here}
            executor = _C.Executor(
                schedule=schedule,
                rank=rank,
                replica=grid.replica,
                num_replicas=grid.width,
                # The ranks of one process share its cores.
                num_threads=0 if grid.in_processes else max(1, threads // len(grid.local_ranks)),
                warmup_batches=options.pipeline.warmup_batches,
                stages=[
                    _C.StageSetup(
                        index=i,
                        stage=weights_of[i].engine,
                        forward=while_alive(runners[i].forward),
                        recompute=options.recompute[i % d],
                        graphs=graph_setup(runners[i], options, len(grid.stages)),
                    )
                    for i in here
                ],
                fault=self.control.fault,
                discards=self.control.discards,
                discards_reach_all=self.control.discards_reach_all,
                losses=self.losses,
                keep_error=keeping(weakref.ref(self._errors)),
            )
            stages += [
                LocalStage(index=i, weights=weights_of[i], runner=runners[i], executor=executor)
                for i in schedule.update_order(rank)
            ]
        torch.set_num_threads(threads)  # setting a thread's number sets the default of new ones
        return stages

    def __getitem__(self, position: int) -> LocalStage:
        return self._stages[position]

    def __iter__(self) -> Iterator[LocalStage]:
        return iter(self._stages)

    def connect(self, mode: Mode) -> None:
        """Gives the stages the mode's functions and channels. Every rank calls it."""
        channels = self._channels
        d = self.grid.depth
        firsts = range(0, self.grid.num_stages, d)
        channels.make([(first + a, first + b) for first in firsts for a, b in mode.edges()])
        self.joint_updates.connect(mode.wiring, mode.edges())
        options, splits = self.options.compile_options, self.schedule.splits_backward
        for stage in self._stages:
            here = stage.index
            program = mode.programs[here % d]
            weights = stage.weights
            functions = (program.bind(clone, weights.device) for clone in weights.clones)
            stage.bound[mode.wiring] = BoundProgram(
                program,
                [compiled(each, options, splits_backward=splits) for each in functions],
                to_processes=self.grid.in_processes,
            )
            first = here - here % d
            producers = [first + producer for producer in sorted(program.receives)]
            consumers = [first + consumer for consumer in sorted(program.sends)]
            inbound, outbound = (
                [
                    _C.EdgeEnd(
                        receiver=channels.receivers[other, here],
                        sender=channels.senders[here, other],
                        other=other,
                    )
                    for other in others
                ]
                for others in (producers, consumers)
            )
            stage.executor.set_wiring(
                stage=here, id=mode.wiring, inbound=inbound, outbound=outbound
            )

    def check_written(self, *, running: bool) -> None:
        """Raises ValueError if parameters were written to at the wrong time or elsewhere."""
        for stage in self._stages:
            stage.weights.check_written(running=running)

    def check_requires_grad(self) -> None:
        """Raises ValueError if a parameter was frozen or unfrozen after the pipeline was made."""
        for stage in self._stages:
            stage.weights.check_requires_grad()

    def of_first_pipeline(self) -> list[LocalStage]:
        """The stages that evaluate, and whose buffers are the model's."""
        return [stage for stage in self._stages if self.grid.pipeline(stage.index) == 0]

    def submit_train_step(self, run: _C.Run) -> None:
        """Begins a train_step."""
        self._tickets.append([executor.submit_run(run) for executor in self.executors])

    def let_updates_wait(self, waits: bool) -> None:
        """Makes updates wait until no stage can fail in their batch, or not.

        Every rank calls it, alike; drained. ValueError if the schedule could not go on.
        """
        if waits:
            self.schedule.check_global_updates()
        verdicts = self.verdicts if waits else None
        for executor in self.executors:
            executor.set_verdicts(verdicts)
        self.updates_wait = waits

    def set_late_forwards(self, late: Sequence[int]) -> None:
        """Makes so many of a batch's first forwards late on each stage; none given: all.

        Every rank calls it, drained. ValueError if the schedule could not go on.
        """
        self.schedule = self.schedule.with_late_forwards(late)
        for executor in self.executors:
            executor.set_late_forwards(late)
        self.joint_updates.plan_anew()

    def record(self, purpose: str) -> None:
        """Records what the executors do from now on. What was recorded before is dropped."""
        self.take_record()
        self.recorded_for = purpose
        for executor in self.executors:
            executor.record(True)

    def take_record(self) -> list[_C.ExecutedAction]:
        """What has been recorded; ends recording."""
        self.recorded_for = None
        for executor in self.executors:
            executor.record(False)
        return [action for executor in self.executors for action in executor.take_record()]

    def wait_for_room(self, max_unfinished: int) -> None:
        """Waits until fewer than ``max_unfinished`` train_steps are unfinished."""
        while len(self._tickets) >= max_unfinished:
            self._wait_for(self._tickets[0])
            del self._tickets[0]

    def drain(self) -> None:
        """Runs the schedule's epilogue on every stage and waits for it."""
        with interrupts_later():
            for executor in self.executors:
                executor.submit_drain()
            self.losses.drain()
        self._finish()
        self._tickets.clear()

    def stop(self) -> None:
        """Ends the engine, whatever is unfinished."""
        self._tickets.clear()
        self.end()

    def finish_submitted(self) -> None:
        """Waits until everything submitted so far has been executed, if no later batch must be."""
        if not self.joint_updates.need_later_batches:
            self._finish()

    def wait_for_devices(self) -> None:
        """Waits until they have done what they were given, for which others may have to send.

        Raises:
            PeerTimeout: they have not in time.
        """

        def wait() -> None:
            for executor in self.executors:
                executor.wait_for_devices()

        if any(map(is_apart_from_host, self.options.devices)):
            self.control.deadline.wait("devices finished", wait)

    def _finish(self) -> None:
        self._wait_for([executor.last_ticket for executor in self.executors])
        for executor in self.executors:
            executor.join_here()

    def _wait_for(self, tickets: Sequence[int]) -> None:
        for executor, ticket in zip(self.executors, tickets, strict=True):
            executor.wait(ticket)

    def take_error(self, kept: int) -> BaseException | None:
        """The Python exception of that number, if it was raised here; forgets all."""
        error = self._errors[kept] if kept >= 0 else None
        self._errors.clear()
        return error


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end: what is inside is done whole.

    Inside nobody may wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread
        return
    came: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def last_uncaught() -> BaseException | None:
    """The last exception that nobody caught, such as an interrupt.

    IPython and Python's own prompt keep it, as programs go on there.
    """
    return getattr(sys, "last_value", None)


def _device_of_each(schedule: _C.Schedule, devices: Sequence[torch.device]) -> list[torch.device]:
    """The device of each of the schedule's stages, given those of the model's stages.

    A copy of a stage is where the stage of the first pipeline is that shares its rank.
    """
    d = schedule.depth
    placed = dict(zip(schedule.placement[:d], devices, strict=True))
    return [placed.get(rank, devices[stage % d]) for stage, rank in enumerate(schedule.placement)]


def replicas_of_loss(grid: RankGrid, options: StageOptions) -> range:
    """The replicas on whose rows this replica's loss is defined."""
    return range(grid.width) if options.is_one_batch else range(grid.replica, grid.replica + 1)


def _loss_board(
    grid: RankGrid, control: ControlPlane, options: StageOptions, schedule: _C.Schedule
) -> _C.LossBoard:
    """Makes the board that brings losses from the last stages to this process.

    A loss is the replica's own. Where the rows of all replicas are one batch it is that batch's:
    each replica's last stage adds its part to those of the replicas before.
    """
    replicas = replicas_of_loss(grid, options)
    return _C.LossBoard(
        fault=control.fault,
        group="" if control.group is None else control.group.group_name,
        shared=None if control.peers is None else control.peers.board,
        ranks=[
            grid.process_of(stage, replica)
            for replica in replicas
            for stage in range(grid.num_stages)
        ],
        replica=grid.replica,
        num_replicas=grid.width,
        num_parts=len(replicas) * grid.num_pipelines,
        first_part=replicas.index(grid.replica) * grid.num_pipelines,
        num_numbers=1 + len(options.metrics),
        runs_behind=schedule.forward_batches_behind,
    )
