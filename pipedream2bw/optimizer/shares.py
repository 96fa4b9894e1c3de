"""Optimizer state of which each replica has a share: ``shard_state`` of PipelineOptimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..ranks.deadline import Deadline
from ..ranks.groups import broadcast, told_by_all
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .fused import Holders
from .own_step import Steppers
from .state_by_name import states_on


def forget_others(holders: Holders, stages: Sequence[StageWeights]) -> None:
    """Drops what was loaded of parameters that other replicas step, or elements of them."""
    own = stepped_here(stages)
    for weights in stages:
        for original in weights.originals:
            if id(original) not in own:
                _, optimizer, _ = holders[id(original)]
                optimizer.state.pop(original, None)


def stepped_here(stages: Sequence[StageWeights]) -> set[int]:
    """The ids of the parameters that this replica steps whole, and whose state optimizers hold.

    A tied parameter has a copy on several stages, which replicas share out one by one. The state of
    the first copy is the optimizer's; the others' steppers hold theirs.
    """
    return {
        id(original)
        for weights in stages
        for i, original in enumerate(weights.originals)
        if weights.handles[i] is original and weights.engine.owns(i) and not is_divided(weights, i)
    }


def is_divided(weights: StageWeights, parameter: int) -> bool:
    """Whether several replicas step elements of it."""
    return len(weights.engine.owners(parameter)) > 1


class _Like(NamedTuple):
    """Stands for a tensor that is sent apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@contextlib.contextmanager
def whole_states(
    session: Session, stages: Sequence[StageWeights], holders: Holders, steppers: Steppers
) -> Iterator[None]:
    """Meanwhile the optimizers' states have all parameters of this process's stages.

    Every rank calls it, drained. After a failure there is only what this replica steps.
    """
    own = stepped_here(stages)
    try:
        for weights in stages:
            if not weights.engine.is_shared or session.ending.has_failed:
                continue
            names, states = list(weights.trainable), states_on(weights, holders, steppers)
            found = all_shares(session, weights, {names[i]: states[i] for i in states})
            for name, original in zip(names, weights.originals, strict=True):
                if found.get(name) and id(original) not in own:
                    _, optimizer, _ = holders[id(original)]
                    optimizer.state[original] = found[name]
        yield
    finally:
        forget_others(holders, stages)


def all_shares(
    session: Session, weights: StageWeights, mine: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """As :func:`of_all_replicas`, in the group of the stage's replicas; drained."""
    group = session.grid.replica_group(weights.index)
    assert group is not None
    weights.engine.settle(session.control.fault)  # sums that use the group
    return of_all_replicas(weights, mine, group, session.grid.deadline)


def of_all_replicas(
    weights: StageWeights,
    mine: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup,
    deadline: Deadline,
) -> dict[str, dict[str, Any]]:
    """Gives every replica what all have of a stage's parameters, tensors of some elements whole.

    Args:
        mine: by parameter, what this replica has; vectors of its elements alone.
        group: of the replicas, all of which call it with the same names.
    """
    described = {n: {key: _described(v) for key, v in of.items()} for n, of in mine.items()}
    told = told_by_all(described, group, deadline, "gathering")
    found: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(weights.trainable):
        owners = weights.engine.owners(i)
        for key, value in told[owners[0][0]].get(name, {}).items():
            found.setdefault(name, {})[key] = value
            if not isinstance(value, _Like):
                continue
            device = torch.device("cpu") if value.on_host else weights.device
            if len(owners) > 1 and value.shape == (owners[0][2],):
                like = weights.engine.weight(0, i)  # of any version
                whole = torch.empty_strided(
                    like.shape, like.stride(), dtype=value.dtype, device=device
                )
                flat = whole.as_strided((like.numel(),), (1,))
                pieces = [(rank, flat.narrow(0, begin, count)) for rank, begin, count in owners]
            else:
                whole = torch.empty(value.shape, dtype=value.dtype, device=device)
                pieces = [(owners[0][0], whole)]
            for rank, piece in pieces:
                if rank == group.rank():
                    piece.copy_(mine[name][key])
                broadcast(piece, group, rank, deadline)
            found[name][key] = whole
    return found


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Like(tuple(value.shape), value.dtype, value.device.type == "cpu")
