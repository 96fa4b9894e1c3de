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
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

import torch

from ..errors import reworded
from ..optimizer.cut import OptimizerCut, OwnChanges, SavedOptimizers, StateByName
from ..optimizer.shares import is_cut, of_all_replicas
from ..ranks.grid import RankGrid
from ..runtime.discarding import TakenBack
from ..runtime.extension import Extension
from ..runtime.local_model import LocalModel
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from .copies import HostMemory
from .encoding import encode

MODEL, OPTIMIZER, RANK = "model", "optimizer", "rank"
"""Kinds of files: the newest weights, the optimizers' state, what is each rank's own."""


def buffer_prefix(pipeline: int) -> str:
    """What is before the names of buffers, in a rank's own file."""
    return "buffer/" if pipeline == 0 else f"buffer-of-pipeline-{pipeline}/"


def older(age: int) -> str:
    """The kind of file of weights that many versions older than the newest."""
    return f"older-{age}"


@dataclasses.dataclass(kw_only=True, eq=False)
class Cut(Extension):
    """A process's part of the state, as it is copied.

    Attributes:
        batch: the number of the batch that follows.
        tensors: by kind of file and name.
        numbers: what optimizers keep of a parameter beside tensors, by its name.
        model_state: what this rank's modules gave as ``get_extra_state``, encoded, by their names.
        refused: why a module's cannot be saved.
        own_changes: what optimizers changed in their groups, by stage.
        shared: what the optimizers share, when all stages have been copied.
        copied: done when everything is in ``tensors``, or on its way.
        under_way: after these events it is there.
    """

    batch: int
    tensors: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    numbers: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)
    model_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: Exception | None = None
    own_changes: dict[int, OwnChanges] = dataclasses.field(default_factory=dict)
    shared: SavedOptimizers | None = None
    copied: Future[None] = dataclasses.field(default_factory=Future)
    under_way: list[torch.Event] = dataclasses.field(default_factory=list)

    def add(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        """Adds tensors of a file."""
        self.tensors.setdefault(kind, {}).update(tensors)

    def taken_back(self, taken: TakenBack) -> None:
        """Ends without a copy if a batch before it has not been. All stages are idle.

        The version that would be copied is not made then: no stage has copied it.
        """
        if self.batch > taken.batch and not self.copied.done():
            cause = taken.error
            text = (
                f"batch {taken.batch} was discarded before batch {self.batch} was copied: {cause}"
            )
            self.copied.set_exception(reworded(cause, text))


def begin_cut(
    session: Session,
    optimizer: OptimizerCut | None,
    memory: HostMemory,
    *,
    all_versions: bool,
    in_model: Collection[str],
) -> Cut:
    """Begins to copy this process's part of the state; returns at once.

    Args:
        memory: for the copies.
        all_versions: whether versions older than the newest are copied too.
        in_model: names of the buffers that are saved with the weights, too, as a ``state_dict`` is:
            the first replica's.
    """
    cut = Cut(batch=session.accumulation.num_updates)
    stages = list(session.stages)
    oldest = {
        stage.index: stage.executor.version_of_batch(stage.index, cut.batch)
        if all_versions
        else cut.batch
        for stage in stages
    }
    lock = threading.Lock()
    left = 2 * len(stages)  # weights and buffers of each

    def then(do: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            nonlocal left
            try:
                do()
                with lock:
                    left -= 1
                    if left == 0:
                        if optimizer is not None:
                            versions = range(min(oldest.values()), cut.batch + 1)
                            changes = [cut.own_changes[stage.index] for stage in stages]
                            cut.shared = optimizer.shared(changes, versions)
                        cut.copied.set_result(None)
            except BaseException as error:  # training goes on
                with lock:
                    if not cut.copied.done():
                        cut.copied.set_exception(error)

        return call

    tied = session.local_model.tied_names()
    for stage in stages:
        copy = then(
            _copying(stage, cut, optimizer, memory, oldest[stage.index], session.grid, tied)
        )
        copy = stage.runner.calls.once(session.num_train_steps, copy)
        stage.executor.submit_copy(stage=stage.index, version=cut.batch, copy=copy)
        pipeline = session.grid.pipeline(stage.index)
        model = session.local_model if pipeline == session.grid.replica == 0 else None
        copy = then(_copying_buffers(stage, cut, memory, pipeline, in_model, model))
        stage.runner.calls.before(session.num_train_steps, copy)
    session.extensions.add(cut)
    return cut


def _saved_here(grid: RankGrid, stage: LocalStage) -> set[str]:
    """The names of a stage's parameters that this process saves.

    The processes that hold a stage share them out, as their optimizers do if these have shares; of
    two pipelines the first one's save all.
    """
    weights = stage.weights
    is_first = grid.pipeline(stage.index) == 0
    counted = [name for name in weights.in_root if weights.counts(name)]
    mine = {
        name
        for number, name in enumerate(counted)
        if is_first and number % grid.width == grid.replica
    }
    if weights.engine.is_shared:
        mine -= weights.trainable.keys()
        owned = [name for i, name in enumerate(weights.trainable) if weights.engine.leads(i)]
        mine |= set(owned).intersection(counted)
    return mine


def _copying(
    stage: LocalStage,
    cut: Cut,
    optimizer: OptimizerCut | None,
    memory: HostMemory,
    oldest: int,
    grid: RankGrid,
    tied: Mapping[str, str],
) -> Callable[[], None]:
    weights, engine = stage.weights, stage.weights.engine

    def copy() -> None:
        mine = _saved_here(grid, stage)
        live: dict[tuple[str, str], torch.Tensor] = {}
        for i, name in enumerate(weights.trainable):
            if name in mine:
                live[MODEL, tied.get(name, name)] = engine.master(engine.slot_of(cut.batch), i)
                for version in range(oldest, cut.batch):
                    weight = engine.weight(engine.slot_of(version), i)
                    live[older(cut.batch - version), tied.get(name, name)] = weight
        states = optimizer.of_stage(weights) if optimizer is not None else {}
        if optimizer is not None:  # now: when the last stage is copied, this one may have gone on
            cut.own_changes[stage.index] = optimizer.own_changes(weights)
        for name, whole in _joined(stage, states, cut.batch, grid).items():
            master = whole.pop(MODEL, None)
            if name in mine and master is not None:
                live[MODEL, tied.get(name, name)] = master
            if name in states:
                states[name] = whole
        for name in mine.intersection(states):
            for key, value in states[name].items():
                if isinstance(value, torch.Tensor):
                    live[OPTIMIZER, f"{tied.get(name, name)}/{key}"] = value
                else:
                    kept = cut.numbers.setdefault(tied.get(name, name), {})
                    kept[key] = deepcopy(value)  # a list of tensors, which the next step changes
        copies = memory.copy(live, ("weights", stage.index))
        for (kind, name), tensor in copies.items():
            cut.add(kind, {name: tensor})
        # Only a load writes to frozen weights, and waits for the save (FrozenInUse).
        frozen = {name: p.detach() for name, p in weights.frozen.items() if name in mine}
        cut.add(MODEL, {tied.get(name, name): parameter for name, parameter in frozen.items()})

    return copy


def _joined(
    stage: LocalStage, states: StateByName, batch: int, grid: RankGrid
) -> dict[str, dict[str, Any]]:
    """What several replicas have elements of, whole: states, and masters as ``MODEL``.

    All replicas copy the same versions, in one order.
    """
    weights, engine = stage.weights, stage.weights.engine
    divided = [(i, name) for i, name in enumerate(weights.trainable) if is_cut(weights, i)]
    if not divided:
        return {}
    group = grid.savers(stage.index)
    mine: dict[str, dict[str, Any]] = {}
    for i, name in divided:
        for rank, begin, count in engine.owners(i):
            if rank == group.rank():
                mine[name] = dict(states.get(name, {}))
                if engine.hides_master(i):
                    master = engine.master(engine.slot_of(batch), i)
                    mine[name][MODEL] = master.as_strided((count,), (1,), begin)
    on_host = {
        name: {k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in of.items()}
        for name, of in mine.items()
    }
    return of_all_replicas(weights, on_host, group, grid.deadline)


def _copying_buffers(
    stage: LocalStage,
    cut: Cut,
    memory: HostMemory,
    pipeline: int,
    in_model: Collection[str],
    model: LocalModel | None,
) -> Callable[[], None]:
    """Copies the stage's buffers, and what its modules keep beside them if a model is given."""
    prefix = buffer_prefix(pipeline)

    def copy() -> None:
        # Before what the stage's stream is given next, which may write to them; its thread does not
        # wait.
        buffers = stage.weights.named_buffers()
        copies, events = memory.begin_copy(buffers, ("buffers", stage.index))
        cut.under_way += events
        cut.add(RANK, {prefix + name: tensor for name, tensor in copies.items()})
        if pipeline == 0:
            cut.add(MODEL, {name: copies[name] for name in copies if name in in_model})
        if model is not None:
            try:
                _keep_extra_state(model.extra_state(stage.index), stage.index, cut, memory)
            except Exception as error:  # of the user's code: told when the stage's part is written
                cut.refused = error

    return copy


def _keep_extra_state(state: Mapping[str, Any], stage: int, cut: Cut, memory: HostMemory) -> None:
    kept: dict[str, torch.Tensor] = {}
    cut.model_state.update(encode(state, f"stage{stage}/model_state", kept))
    # Their owners go on changing them.
    detached = {name: tensor.detach() for name, tensor in kept.items()}
    copies, events = memory.begin_copy(detached, ("model_state", stage))
    cut.under_way += events
    cut.add(RANK, copies)
