"""The values of a stage's weights as others read and set them: with masters, on all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..ranks.grid import RankGrid
from ..ranks.groups import broadcast
from .stage_weights import StageWeights

_PIECE = 2**26
"""Elements of what is in the host's memory and goes through a stage's device at once."""


@contextlib.contextmanager
def masters_shown(
    stages: Iterable[StageWeights], *, change: bool = False, whole: bool = False
) -> Iterator[None]:
    """Meanwhile the handles are float32 where there is a master, hidden ones too.

    Args:
        change: what is written to handles meanwhile becomes their newest weights; the others' stay.
        whole: also the masters that replicas share out, for which all of them call it;
            otherwise another replica's are their roundings.
    """
    with contextlib.ExitStack() as shown:
        for weights in stages:
            shown.enter_context(_masters_shown(weights, change=change, whole=whole))
        yield


@contextlib.contextmanager
def _masters_shown(weights: StageWeights, *, change: bool, whole: bool) -> Iterator[None]:
    engine = weights.engine
    slot = engine.newest_slot
    hidden = [i for i in range(len(weights.handles)) if engine.hides_master(i)]
    for i, master in zip(hidden, newest_masters(weights, hidden, whole=whole), strict=True):
        weights.handles[i].data = master.to(weights.device)
    before = [handle._version for handle in weights.handles]
    try:
        yield
    finally:
        for i, handle in enumerate(weights.handles if change else ()):
            if handle._version == before[i]:
                continue
            if i in hidden:
                engine.set_master(i, handle.detach())
            else:
                engine.weight(slot, i).copy_(engine.master(slot, i))
        weights.show_newest()


def newest_masters(
    weights: StageWeights, numbers: Sequence[int], *, whole: bool
) -> list[torch.Tensor]:
    """The masters of some parameters; for whole ones all replicas call it."""
    engine = weights.engine
    of_all = engine.whole_masters(weights.fault) if whole else []
    masters = [of_all[i] if whole else engine.master(engine.newest_slot, i) for i in numbers]
    return [master for master in masters if master is not None]


def load_versions(
    weights: StageWeights, versions: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    """Sets the parameters' values. The pipeline must be drained.

    Args:
        versions: by number, one after the other; frozen parameters are in the newest.
    """
    engine = weights.engine
    newest = max(versions)
    engine.load_versions(min(versions), newest)
    weights.show_newest()
    with torch.no_grad():
        for version, values in versions.items():
            slot = engine.slot_of(version)
            for i, name in enumerate(weights.trainable):
                value = values[name]
                if engine.hides_master(i):  # a split one has a rounding of its own
                    engine.set_master(i, value.float())
                    value = engine.weight(engine.newest_slot, i)
                engine.weight(slot, i).copy_(value)
        with masters_shown([weights], change=True):
            for name, parameter in (*weights.trainable.items(), *weights.frozen.items()):
                parameter.copy_(versions[newest][name])


def take_over(stages: Sequence[StageWeights], grid: RankGrid) -> None:
    """Sets every version of replicas and copies of a stage to what the first has.

    All processes call it. A group is not kept, as its last owner has to be the engine.
    """
    firsts = {stage.index_in_model: stage for stage in stages if stage.is_shown}
    # In one order everywhere: two processes may hold the same two stages.
    for weights in sorted(stages, key=lambda stage: stage.index_in_model):
        group = grid.replica_group(weights.index)
        if not weights.is_shown:
            both = zip(*map(held_tensors, (weights, firsts[weights.index_in_model])), strict=True)
            with torch.no_grad():
                for mine, theirs in both:
                    mine.copy_(theirs)
        elif group is not None:
            first = grid.process_of(weights.index_in_model, replica=0)
            source = dist.get_group_rank(group, first)
            with _shared_masters_follow(weights):
                for tensor in held_tensors(weights):
                    if tensor.device == weights.device:
                        broadcast(tensor, group, source, grid.deadline)
                        continue
                    for piece in torch.split(tensor, _PIECE):  # the device may have no room
                        there = piece.to(weights.device)
                        broadcast(there, group, source, grid.deadline)
                        piece.copy_(there)
        weights.engine.restart_delay()


@contextlib.contextmanager
def _shared_masters_follow(weights: StageWeights) -> Iterator[None]:
    """Masters of this replica alone become the newest weights that are written meanwhile."""
    engine = weights.engine
    slot, before = engine.newest_slot, {}
    for i in range(len(weights.handles) if engine.is_shared else 0):
        if engine.owns(i) and engine.hides_master(i):
            weight = engine.weight(slot, i).clone()
            before[i] = weight, engine.master(slot, i).clone()
    yield
    for i, (weight, master) in before.items():
        written = engine.weight(slot, i)
        is_same = written == weight  # a master has low bits beside
        engine.set_master(i, torch.where(is_same, master, written.float()))


def held_tensors(weights: StageWeights) -> list[torch.Tensor]:
    """The newest weights and their masters, frozen ones and buffers."""
    engine = weights.engine
    newest = engine.slot_buffers(engine.newest_slot)
    # As bytes: gloo sends no int16, which split masters are.
    masters = (buffer.view(torch.uint8) for buffer in engine.master_buffers())
    return [
        *newest,
        *masters,
        *(parameter.data for parameter in weights.frozen.values()),
        *weights.buffers,
    ]
