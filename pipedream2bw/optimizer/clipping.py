"""Bounds on a batch's gradients, before the step."""

from __future__ import annotations

import dataclasses
import math

import torch

from .. import _C
from ..checks import check_number
from ..ranks.boards import make_board
from ..runtime.lazy_numbers import LazyNumber
from ..runtime.local_stages import is_apart_from_host
from ..runtime.session import Session
from .loss_scale import LossScale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping:
    """The clipping and loss scaling that :class:`PipelineOptimizer` was given."""

    max_grad_norm: float | None = None
    norm_type: float = 2.0
    clip_grad_value: float | None = None
    loss_scale: LossScale | None = None

    def check(self, session: Session) -> None:
        """Raises ValueError or TypeError, naming the rule and the value."""
        for name in ("max_grad_norm", "norm_type", "clip_grad_value"):
            value = getattr(self, name)
            if value is not None or name == "norm_type":
                check_number(name, value)
        if self.max_grad_norm is not None and self.clip_grad_value is not None:
            raise ValueError(
                f"max_grad_norm: {self.max_grad_norm}, clip_grad_value: {self.clip_grad_value}: "
                "gradients are clipped by their norm or by value, not both"
            )
        scale: object = self.loss_scale
        if scale is not None and not isinstance(scale, LossScale):
            kind = type(scale).__name__
            raise TypeError(f"loss_scale: {kind} given, it must be a LossScale or None")
        schedule = session.schedule
        if self.loss_scale is not None and not schedule.has_one_delay:
            raise ValueError(
                f"loss_scale: schedule {schedule.name!r} reads versions that are {schedule.delay} "
                "behind: all stages must read one, whose scale the loss is multiplied by"
            )
        if self._needs_norm:
            schedule.check_global_updates()
            if session.grid.num_shards > 1:
                raise ValueError(
                    f"max_grad_norm: {self.max_grad_norm}, 'tp' of the mesh: "
                    f"{session.grid.num_shards}, it must be 1: nothing tells which parameters are "
                    "shards of one and which are equal on all; clip_grad_value works"
                )

    @property
    def _needs_norm(self) -> bool:
        # A loss scale needs it to know whether any gradient anywhere has overflowed.
        return self.max_grad_norm is not None or self.loss_scale is not None

    def install(
        self, session: Session, *, shard_state: bool
    ) -> tuple[_C.GradientNorm | None, _C.LossScale | None]:
        """Makes the pipeline's updates clip and unscale, or not. Every rank calls it; drained.

        Args:
            shard_state: each replica has the sums of some gradients, of which it gives the norms.
        """
        newest = session.accumulation.num_updates
        scale = None
        if self.loss_scale is not None:
            scale = _C.LossScale(**dataclasses.asdict(self.loss_scale), version=newest)
        norm = self._norm(session, scale, shard_state) if self._needs_norm else None
        session.stages.joint_updates.set_norm(norm is not None)
        number_of = _numbers(session)
        for stage in session.stages:
            clipping = _C.Clipping(
                norm=norm,
                max_norm=math.inf if self.max_grad_norm is None else self.max_grad_norm,
                parameters=[
                    number_of[name] if stage.weights.counts(name) else -1
                    for name in stage.weights.trainable
                ],
                gives_norms=session.grid.pipeline(stage.index) == 0,
                max_value=self.clip_grad_value,
                loss_scale=scale,
            )
            clips = norm is not None or self.clip_grad_value is not None
            stage.executor.set_clipping(stage.index, clipping if clips else None)
        return norm, scale

    def _norm(
        self, session: Session, scale: _C.LossScale | None, shard_state: bool
    ) -> _C.GradientNorm:
        grid, board = session.grid, None
        group = grid.group_of_model() if shard_state else grid.group_of_replica()
        num_parameters = len(_numbers(session))
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
            norm_type=self.norm_type,
            is_double=dtypes == {torch.float64},
            stays_on_devices=stays_on_devices,
            group="" if group is None else group.group_name,
            shared=board,
            loss_scale=scale,
        )


def _numbers(session: Session) -> dict[str, int]:
    """The trainable parameters of the whole model, in its order."""
    named = session.root.named_parameters()
    return {name: i for i, (name, _) in enumerate(p for p in named if p[1].requires_grad)}


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
        norm = self._wait_for_update(self._number.wait)
        return math.nan if norm is None else norm[0]
