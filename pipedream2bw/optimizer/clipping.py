"""Bounds on a batch's gradients, before the step."""

from __future__ import annotations

import dataclasses
import math

import torch

from .. import _C
from ..ranks.boards import make_board
from ..runtime.lazy_numbers import LazyNumber, train_steps_until_finished
from ..runtime.local_stages import is_apart_from_host
from ..runtime.session import Session
from .options import OptimizerOptions


def install_clipping(
    session: Session, options: OptimizerOptions
) -> tuple[_C.GradientNorm | None, _C.LossScale | None]:
    """Makes the pipeline's updates clip and unscale, or not. Every rank calls it; drained."""
    newest = session.accumulation.num_updates
    scale = None
    if options.loss_scale is not None:
        scale = _C.LossScale(**dataclasses.asdict(options.loss_scale), version=newest)
    norm = _norm(session, options, scale) if options.needs_norm else None
    if session.stages.joint_updates.have_norm != (norm is not None):
        session.stages.joint_updates.set_norm(norm is not None)
    number_of, _ = _numbers(session)
    for stage in session.stages:
        clipping = None
        if norm is not None or options.clip_grad_value is not None:
            clipping = _C.Clipping(
                norm=norm,
                max_norm=math.inf if options.max_grad_norm is None else options.max_grad_norm,
                parameters=[
                    number_of[name] if stage.weights.counts(name) else -1
                    for name in stage.weights.trainable
                ],
                gives_norms=session.grid.pipeline(stage.index) == 0,
                max_value=options.clip_grad_value,
                loss_scale=scale,
            )
        stage.executor.set_clipping(stage.index, clipping)
    return norm, scale


def _norm(
    session: Session, options: OptimizerOptions, scale: _C.LossScale | None
) -> _C.GradientNorm:
    grid, board = session.grid, None
    # Each replica may have the sums of some gradients, of which it gives the norms.
    group = grid.hosts(of_model=options.shard_state)
    _, num_parameters = _numbers(session)
    if group is not None:
        board = make_board(group, 2 * num_parameters, session.control.deadline)
    stays_on_devices = (  # hosts give norms to other processes, and decide scales by them
        group is None
        and scale is None
        and not session.stages.options.optimizer_on_host
        and all(is_apart_from_host(stage.weights.device) for stage in session.stages)
    )
    dtypes = {parameter.dtype for parameter in session.root.parameters()}
    return _C.GradientNorm(
        fault=session.control.fault,
        num_parameters=num_parameters,
        num_stages=len(session.stages.of_first_pipeline()),
        num_readers=len(list(session.stages)),
        norm_type=options.norm_type,
        is_double=dtypes == {torch.float64},
        stays_on_devices=stays_on_devices,
        group="" if group is None else group.group_name,
        shared=board,
        loss_scale=scale,
    )


def _numbers(session: Session) -> tuple[dict[str, int], int]:
    """Where each trainable parameter's norm is in the table of norms, and the table's length.

    Each shard of a tensor-parallel parameter has a place of its own. What all shards of a stage
    hold alike is counted by the first one; its place is -1 in the others.
    """
    grid, parts = session.grid, session.local_model.parts()
    places, there = {}, 0
    for name, parameter in session.root.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in parts:
            places[name] = there + grid.shard
            there += grid.num_shards
        else:
            places[name] = there if grid.shard == 0 else -1
            there += 1
    return places, there


class GradNorm(LazyNumber):
    """The norm of a batch's gradients before clipping, read when it is wanted."""

    def __init__(self, session: Session, norm: _C.GradientNorm) -> None:
        super().__init__(session)
        self._number = norm.expect(self.train_step)

    def done(self) -> bool:
        """Whether every stage has come to the batch's update."""
        return self._number.done()

    def item(self) -> float:
        """The norm. Waits until the batch's last backward; under "2bw" that is during the next.

        Raises:
            RuntimeError: the pipeline failed before; names the first cause. Or the ``train_step``
                during which the norm comes has not been called.
        """
        self._check_can_come("its", train_steps_until_finished)
        norm = self._wait(self._number.wait)
        return math.nan if norm is None else norm[0]
