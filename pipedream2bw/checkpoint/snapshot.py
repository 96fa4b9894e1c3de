"""What a process saves of a pipeline and its optimizer, between two batches.

Nobody waits for the stages to come to this point. Each one's state is copied when its update of the
batch before has been made, by a thread of its own, and stays as it is until that is done: only the
stage's next update changes it, a batch later. Buffers, and what modules keep beside them, are
copied before the next batch's first forward. So the copies of all stages are of one point in the
run, each taken at another time; what is under way between stages does not belong to it, as in
Chandy and Lamport's snapshots (1985) of channels that are empty.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import wait
from copy import deepcopy
from typing import Any, TypeVar

import torch

from ..errors import reworded
from ..model.local_shards import Part
from ..optimizer.shares import is_divided, of_all_replicas
from ..optimizer.state_by_name import BesideByPart, OptimizerSnapshot, SharedState, StateByName
from ..ranks.grid import RankGrid
from ..runtime.extension import Extension, TakenBack
from ..runtime.local_model import LocalModel
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from .encoding import encode
from .parts import name_of_part
from .saving import Saving
from .tensor_file import check_saveable

_Name = TypeVar("_Name", bound=Hashable)

MODEL, OPTIMIZER, RANK = "model", "optimizer", "rank"
"""Kinds of files: the newest weights, the optimizers' state, what is each rank's own."""


def buffer_prefix(pipeline: int) -> str:
    """What is before the names of buffers, in a rank's own file."""
    return "buffer/" if pipeline == 0 else f"buffer-of-pipeline-{pipeline}/"


def older(age: int) -> str:
    """The kind of file of weights that many versions older than the newest."""
    return f"older-{age}"


class HostMemory:
    """Memory of the host for one copy of a process's state.

    New pages cost the system about as much as copying to them: so they are kept. Tensors that share
    their memory, as a stage's parameters do, are copied at once. Copies of a device's tensors are
    page-locked, so that the device makes them while the host does something else.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._lock = threading.Lock()

    def copy(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> dict[_Name, torch.Tensor]:
        """Copies tensors to the CPU, and waits until that is done; see :meth:`begin_copy`."""
        copies, events = self.begin_copy(tensors, place)
        wait_for(events)
        return copies

    def begin_copy(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> tuple[dict[_Name, torch.Tensor], list[torch.Event]]:
        """Begins to copy tensors to the CPU, in their devices' current streams.

        Any thread may call it, and waits for nothing.

        Args:
            place: names these tensors among others of the same memory. What was copied there is
                overwritten.

        Returns:
            The copies, and events after which they are there.
        """
        storages: dict[int, list[_Name]] = {}
        for name, tensor in tensors.items():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        copies: dict[_Name, torch.Tensor] = {}
        for number, names in enumerate(storages.values()):
            copies |= self._of_one_storage({n: tensors[n] for n in names}, (place, number))
        events = []
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            events.append(torch.Event(device))
            events[-1].record(torch.accelerator.current_stream(device))
        return {name: copies[name] for name in tensors}, events

    def _of_one_storage(
        self, tensors: Mapping[_Name, torch.Tensor], place: Hashable
    ) -> dict[_Name, torch.Tensor]:
        storage = next(iter(tensors.values())).untyped_storage()
        pinned = storage.device.type != "cpu"
        if 2 * sum(tensor.nbytes for tensor in tensors.values()) < storage.nbytes():
            return {  # a small part of something else
                name: torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(
                    tensor.detach(), non_blocking=True
                )
                for name, tensor in tensors.items()
            }
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        with self._lock:
            memory = self._kept.get(place)
            if memory is None or memory.numel() != source.numel():
                memory = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=pinned)
                self._kept[place] = memory
        memory.copy_(source, non_blocking=True)
        return {name: _view(memory, tensor) for name, tensor in tensors.items()}


def wait_for(events: Iterable[torch.Event]) -> None:
    """Waits until devices are done with what they were given before the events."""
    for event in events:
        event.synchronize()


def _view(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = memory.numel() - memory.numel() % like.element_size()
    elements = memory[:whole].view(like.dtype)
    return elements.as_strided(like.shape, like.stride(), like.storage_offset())


@dataclasses.dataclass(kw_only=True, eq=False)
class Snapshot(Extension):
    """A process's part of the state, as it is copied.

    Attributes:
        saving: the save whose part it is.
        reads_frozen: whether there are frozen weights. They are read where they are, and must not
            change before the save is done.
        tensors: by kind of file and name.
        numbers: what optimizers keep of a parameter beside tensors, by its name.
        model_state: what this rank's modules gave as ``get_extra_state``, encoded, by their names.
        refused: why a module's cannot be saved.
        beside: what optimizers keep beside their parameters' states, by stage.
        shared: what the optimizers share, when all stages have been copied.
        under_way: events after which devices have made their copies.
    """

    saving: Saving
    reads_frozen: bool
    tensors: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    model_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: Exception | None = None
    beside: dict[int, dict[int, BesideByPart]] = dataclasses.field(default_factory=dict)
    shared: SharedState | None = None
    under_way: list[torch.Event] = dataclasses.field(default_factory=list)

    def add(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors.setdefault(kind, {}).update(tensors)

    def before_load(self, seconds: float) -> None:
        """Waits until frozen weights may change; TimeoutError if the save takes longer."""
        if self.reads_frozen and wait([self.saving.done], seconds).not_done:
            raise TimeoutError(
                f"load: a save under way has not ended within {seconds:g} s: it reads frozen "
                "weights, which must not change until then"
            )

    def taken_back(self, taken: TakenBack) -> None:
        """Ends without a copy if a batch before it has not been. All stages are idle.

        The version that would be copied is not made then: no stage has copied it.
        """
        step, copied, cause = self.saving.step, self.saving.copied, taken.error
        if step > taken.batch and not copied.done():
            text = f"batch {taken.batch} was discarded before batch {step} was copied: {cause}"
            copied.set_exception(reworded(cause, text))


def begin_snapshot(
    session: Session,
    optimizer: OptimizerSnapshot | None,
    memory: HostMemory,
    saving: Saving,
    *,
    all_versions: bool,
    in_model: Collection[str],
) -> Snapshot:
    """Begins to copy this process's part of the state; returns at once.

    Args:
        memory: for the copies.
        all_versions: whether versions older than the newest are copied too.
        in_model: names of the buffers that are saved with the weights, too, as a ``state_dict`` is:
            the first replica's.
    """
    stages = list(session.stages)
    snapshot = Snapshot(saving=saving, reads_frozen=any(stage.weights.frozen for stage in stages))
    copier = _Copier(
        snapshot=snapshot,
        grid=session.grid,
        memory=memory,
        optimizer=optimizer,
        all_versions=all_versions,
        tied=session.local_model.tied_names(),
        parts=session.local_model.parts(),
        in_model=in_model,
        model=session.local_model,
    )
    oldest = {stage.index: saving.step for stage in stages}
    for stage in stages if all_versions else ():
        oldest[stage.index] = stage.executor.version_of_batch(stage.index, saving.step)
    versions = range(min(oldest.values()), saving.step + 1)
    lock = threading.Lock()
    left = 2 * len(stages)  # weights and buffers of each

    def counted(copy: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            nonlocal left
            try:
                copy()
                with lock:
                    left -= 1
                    if left == 0:
                        if optimizer is not None:
                            beside = [each for _, each in sorted(snapshot.beside.items())]
                            snapshot.shared = optimizer.shared(beside, versions)
                        saving.copied.set_result(None)
            except BaseException as error:  # training goes on
                with lock:
                    if not saving.copied.done():
                        saving.copied.set_exception(error)

        return run

    train_step = session.num_train_steps
    for stage in stages:
        calls = stage.runner.calls
        weights = functools.partial(copier.copy_weights, stage, oldest[stage.index])
        copy = calls.once(train_step, counted(weights))
        stage.executor.submit_copy(stage=stage.index, version=saving.step, copy=copy)
        calls.before(train_step, counted(functools.partial(copier.copy_buffers, stage)))
    session.extensions.add(snapshot)
    return snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copier:
    """Copies the stages' parts of a snapshot.

    Attributes:
        tied: further names of parameters, and the first one of each.
        parts: of parameters, by name, that this process saves a shard of.
    """

    snapshot: Snapshot
    grid: RankGrid
    memory: HostMemory
    optimizer: OptimizerSnapshot | None
    all_versions: bool
    tied: Mapping[str, str]
    parts: Mapping[str, Part]
    in_model: Collection[str]
    model: LocalModel

    def copy_weights(self, stage: LocalStage, oldest: int) -> None:
        """Copies versions, masters and the optimizers' state, when the update has been made."""
        snapshot, optimizer = self.snapshot, self.optimizer
        batch = snapshot.saving.step
        weights, engine = stage.weights, stage.weights.engine
        mine = self._names_saved_here(stage)
        saved_as = {name: self._saved_as(name) for name in mine}
        live: dict[tuple[str, str], torch.Tensor] = {}
        for i, name in enumerate(weights.trainable):
            if name in mine:
                live[MODEL, saved_as[name]] = engine.master(engine.slot_of(batch), i)
                # Else the newest is its master's rounding.
                is_ahead = self.all_versions and i in weights.ahead
                for version in range(oldest, batch + is_ahead):
                    weight = engine.weight(engine.slot_of(version), i)
                    live[older(batch - version), saved_as[name]] = weight
        states: StateByName = {}
        if optimizer is not None:  # now: when the last stage is copied, this one may have gone on
            states = optimizer.of_stage(weights)
            snapshot.beside[stage.index] = optimizer.beside(weights, batch - 1)
        for name, whole in self._divided(stage, states).items():
            master = whole.pop(MODEL, None)
            if name in mine and master is not None:
                live[MODEL, saved_as[name]] = master
            if name in states:
                states[name] = whole
        for name in mine.intersection(states):
            for key, value in states[name].items():
                if isinstance(value, torch.Tensor):
                    check_saveable(f"{name}/{key}", value)
                    live[OPTIMIZER, f"{saved_as[name]}/{key}"] = value
                else:
                    kept = snapshot.numbers.setdefault(saved_as[name], {})
                    kept[key] = deepcopy(value)  # a list of tensors, which the next step changes
        copies = self.memory.copy(live, ("weights", stage.index))
        for (kind, name), tensor in copies.items():
            snapshot.add(kind, {name: tensor})
        # Only a load writes to frozen weights, and waits for the save.
        frozen = {saved_as[n]: p.detach() for n, p in weights.frozen.items() if n in mine}
        snapshot.add(MODEL, frozen)

    def _names_saved_here(self, stage: LocalStage) -> set[str]:
        """The names of the stage's parameters that this process saves.

        The processes that hold a stage share them out, as their optimizers do if these have shares;
        of two pipelines the first one's save all.
        """
        weights, grid = stage.weights, self.grid
        counted = [name for name in weights.in_root if weights.counts(name)]
        mine = set(counted[grid.replica :: grid.width])
        if grid.pipeline(stage.index) != 0:
            mine = set()
        if weights.engine.is_shared:
            mine -= weights.trainable.keys()
            owned = [name for i, name in enumerate(weights.trainable) if weights.engine.leads(i)]
            mine |= set(owned).intersection(counted)
        return mine if grid.shard == 0 else mine & self.parts.keys()

    def _saved_as(self, name: str) -> str:
        first = self.tied.get(name, name)
        part = self.parts.get(name)
        return first if part is None else name_of_part(first, part.number, part.num_parts)

    def _divided(self, stage: LocalStage, states: StateByName) -> StateByName:
        """What several replicas have elements of, whole: states, and masters as ``MODEL``.

        All replicas copy the same versions, in one order.
        """
        weights, engine = stage.weights, stage.weights.engine
        divided = [(i, name) for i, name in enumerate(weights.trainable) if is_divided(weights, i)]
        if not divided:
            return {}
        group = self.grid.savers(stage.index)
        mine: StateByName = {}
        for i, name in divided:
            for rank, begin, count in engine.owners(i):
                if rank == group.rank():
                    mine[name] = dict(states.get(name, {}))
                    if engine.hides_master(i):
                        master = engine.master(engine.slot_of(self.snapshot.saving.step), i)
                        mine[name][MODEL] = master.as_strided((count,), (1,), begin)
        on_host = {
            name: {k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in of.items()}
            for name, of in mine.items()
        }
        return of_all_replicas(weights, on_host, group, self.grid.deadline)

    def copy_buffers(self, stage: LocalStage) -> None:
        """Copies buffers, and what modules keep beside them, before the next batch's forward."""
        snapshot, grid, index = self.snapshot, self.grid, stage.index
        pipeline = grid.pipeline(index)
        copies = self._begin_copy(stage.weights.named_buffers(), ("buffers", index))
        snapshot.add(RANK, {buffer_prefix(pipeline) + n: copy for n, copy in copies.items()})
        if pipeline == 0:
            snapshot.add(MODEL, {name: copies[name] for name in copies if name in self.in_model})
        if not pipeline == grid.replica == grid.shard == 0:  # another process is asked for them
            return
        try:
            kept: dict[str, torch.Tensor] = {}
            state = self.model.extra_state(index)
            snapshot.model_state.update(encode(state, f"stage{index}/model_state", kept))
            # Their owners go on changing them.
            detached = {name: tensor.detach() for name, tensor in kept.items()}
            snapshot.add(RANK, self._begin_copy(detached, ("model_state", index)))
        except Exception as error:  # of the user's code: told when the stage's part is written
            snapshot.refused = error

    def _begin_copy(
        self, tensors: Mapping[str, torch.Tensor], place: tuple[str, int]
    ) -> dict[str, torch.Tensor]:
        """Copies before what the stage's stream is given next, which may write to the tensors.

        The stream's thread does not wait.
        """
        copies, events = self.memory.begin_copy(tensors, place)
        self.snapshot.under_way += events
        return copies
