"""Gradient hooks with DistributedDataParallel's signature, in place of sums over replicas."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import Future  # of which torch.futures.Future is one, and what works give another
from torch._C._distributed_c10d import GradBucket

from .. import _C
from ..errors import WrongHookError, WrongHookTypeError
from ..ranks.operations import Announcement, Operation
from ..rules import FUNCTION, exclusions, refuse, shown
from .extension import HOOKS, OPTIMIZER, Extension
from .runner import while_alive
from .session import Session
from .stage_weights import StageWeights

CommHook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


def replica_group(session: Session, stage: int | None = None) -> dist.ProcessGroup:
    """The processes that hold one of this process's stages, of which it may have one alone.

    Raises:
        ValueError: there is one replica, or the process does not run the stage.
    """
    here = session.grid.stages_of_model
    if stage is None and len(here) == 1:
        (stage,) = here
    if stage not in here:
        raise ValueError(f"replica_group: stage: {stage}, stages of this process: {here}")
    group = session.grid.replica_group(stage)
    if session.grid.width == 1 or group is None:
        raise ValueError("replica_group: width: 1, there must be several replicas")
    return group


def register_comm_hook(session: Session, state: object, hook: CommHook) -> list[StageHook]:
    """Makes hooks do what else adds up the replicas' gradients: see PipelineModule. Drains.

    They are gone with what is returned.
    """

    def check() -> Announcement:
        _check(session, hook)
        return Announcement()

    session.flush_for(Operation.register_comm_hook, check)
    states: list[object] = []

    def make_states() -> None:
        check_hooks(session, is_new=True)
        weights = [stage.weights for stage in session.stages]
        states.extend(_state_of(session, each, state, len(weights)) for each in weights)

    settings = {"hook": shown(hook), "type of the hook's state": type(state).__qualname__}
    with session.ending.lost_ranks_close():
        session.control.together(make_states, same=settings)
    session.accumulation.hooks_average = True
    hooks = []
    for stage, own in zip(session.stages, states, strict=True):
        group = session.grid.replica_group(stage.index)
        assert group is not None
        made = StageHook(stage.weights, hook, own, group=group, fault=session.control.fault)
        hooks.append(made)
        _C.set_hook(stage.weights.engine, while_alive(made.average_all))
    session.extensions.put(HOOKS, hooks)
    return hooks


def check_hooks(session: Session, *, is_new: bool = False) -> None:
    """Raises ValueError if there are hooks, and updates that do not wait for all stages.

    A batch that some replicas know to be discarded would reach the hooks of the others alone.

    Args:
        is_new: hooks are about to be there.
    """
    has_optimizer = not is_new or session.extensions.at(OPTIMIZER)
    if (
        (is_new or session.extensions.at(HOOKS))
        and has_optimizer
        and not session.stages.updates_wait
    ):
        raise ValueError(
            f"register_comm_hook: schedule {session.schedule.name!r} and these optimizers make a "
            "stage's update before all stages are through with the batch. Hooks need a schedule of "
            "one delay, with SGD, Adam or AdamW, or with max_grad_norm= (inf clips nothing). Where "
            "some forwards are fresh, as under 2bw_fresh, they need max_grad_norm="
        )


def _check(session: Session, hook: Any) -> None:
    what = "register_comm_hook"
    FUNCTION.check(f"{what}: hook", hook)
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError as error:
        raise TypeError(f"{what}: hook: {shown(hook)} must take (state, bucket): {error}") from None
    refuse(StageHook.excludes, {**session.facts, what: hook})
    if session.extensions.at(HOOKS):
        raise ValueError(f"{what}: called twice, a pipeline has one hook")
    session.accumulation.check_between_batches(what)


def _state_of(session: Session, weights: StageWeights, state: Any, num_stages: int) -> object:
    group = replica_group(session, weights.index_in_model)
    if state is None:
        return group
    if callable(state):
        state = state(group)
    elif num_stages > 1:
        raise ValueError(
            f"register_comm_hook: state: one {type(state).__name__}, stages of this process: "
            f"{num_stages}, each needs its own: give a function that makes it of the stage's group"
        )
    _check_group(state, group)
    return state


def _check_group(state: Any, group: dist.ProcessGroup) -> None:
    """Raises ValueError if collectives would be made over another group than the replicas'."""
    given = (
        state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", group)
    )
    if given is group:
        return
    expected = dist.get_process_group_ranks(group)
    if given is None or given is dist.group.WORLD:
        shown = "that of all processes, which the main thread uses"
    elif (ranks := dist.get_process_group_ranks(given)) != expected:
        shown = f"ranks {ranks}"
    else:
        return
    raise ValueError(
        f"register_comm_hook: process_group of the state: {shown}, the stage's replicas are ranks "
        f"{expected}: give pipe.replica_group()"
    )


class StageHook(Extension):
    """What a stage's update calls in place of adding up its gradients over the replicas."""

    name = "register_comm_hook"
    excludes = exclusions(
        """
register_comm_hook: given, width: 1 |
    nothing is added up => hooks need several replicas
register_comm_hook: given, schedule: of two pipelines |
    parts of a batch are added, and hooks average => hooks need a schedule of one pipeline
register_comm_hook: given, schedule: of several delays |
    updates wait for all stages where there is one delay => hooks need a schedule of one delay
register_comm_hook: given, optimizer_device: given |
    it takes gradients bucket by bucket as they are added up => hooks need None
register_comm_hook: given, devices of the stages: other than cpu, num_stages: above 1 |
    a hook that takes memory or reads a number there may wait for messages between stages that
    wait for it => there must be 1 stage, or stages on the CPU
register_comm_hook: given, shard_state: True |
    a hook makes all gradients the mean on every replica, of which each would need its share alone
    => it must be one of the two
""",
        {"other than cpu": lambda devices: any(device.type != "cpu" for device in devices)},
    )

    def __init__(
        self,
        weights: StageWeights,
        hook: CommHook,
        state: object,
        *,
        group: dist.ProcessGroup,
        fault: _C.Fault,
    ) -> None:
        self._parameters = weights.originals
        self._buckets = _C.hooked_buckets(weights.engine)
        self._hook = hook
        self._state = state
        self._group = group
        self._fault = fault

    def __repr__(self) -> str:
        return shown(self._hook)

    def average_all(self, buffers: Sequence[torch.Tensor], unscaling: float | None) -> bool:
        """Makes gradients the mean over the replicas, in place; False: the pipeline has failed.

        Args:
            buffers: of the buckets.
            unscaling: what takes the loss scale off gradients; None: they have none.

        Raises:
            WrongHookError, WrongHookTypeError: what the hook gave is no such mean.
        """
        with torch.no_grad():
            if unscaling is not None and buffers:
                for buffer in buffers:
                    buffer.mul_(unscaling)
                overflow = self._any_overflow(buffers)
                if overflow is None:
                    return False
                if overflow:  # on all replicas alike: the batch is skipped
                    for buffer in buffers:
                        buffer.fill_(torch.nan)
                    return True
            return all(self._average(index, buffer) for index, buffer in enumerate(buffers))

    def _average(self, index: int, buffer: torch.Tensor) -> bool:
        places = self._buckets[index]
        bucket = _C.make_bucket(
            index=index,
            count=len(self._buckets),
            buffer=buffer,
            places=places,
            parameters=[self._parameters[parameter] for parameter, _, _ in places],
        )
        future: Any = self._hook(self._state, bucket)
        if not isinstance(future, Future):
            raise WrongHookTypeError(
                f"{shown(self._hook)} returned {type(future).__name__}, it must return a "
                "torch.futures.Future"
            )
        if not self._wait_for(future):
            return False
        mean = future.wait()
        if not isinstance(mean, torch.Tensor):
            raise WrongHookTypeError(
                f"{shown(self._hook)} returned a Future of {type(mean).__name__}, it must be "
                "one of a tensor"
            )
        if mean.shape != buffer.shape:
            raise WrongHookError(
                f"{shown(self._hook)} returned shape {list(mean.shape)}, its bucket has shape "
                f"{list(buffer.shape)}: they must agree"
            )
        if mean.dtype not in (buffer.dtype, bucket.buffer().dtype):  # which the hook may have set
            raise WrongHookError(
                f"{shown(self._hook)} returned {mean.dtype}, its bucket has {buffer.dtype}: "
                "they must agree"
            )
        if mean.data_ptr() != buffer.data_ptr():
            buffer.copy_(mean)
        return True

    def _any_overflow(self, buffers: Sequence[torch.Tensor]) -> bool | None:
        """Whether a gradient of any replica is not finite; None: the pipeline has failed."""
        finite = torch.stack([buffer.isfinite().all() for buffer in buffers]).all()
        number = (~finite).to(torch.float32).reshape(1)
        work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True)
        future = work.get_future()
        if not self._wait_for(future):
            return None
        future.wait()  # raises what made it fail
        return bool(number.item())

    def _wait_for(self, future: Future[Any]) -> bool:
        """Waits until the future is done, without Python's lock; False: the pipeline has failed."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(0.1):
            if self._fault.raised:
                return False
        return True
