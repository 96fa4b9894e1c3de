"""Remedies for gradients that are a batch late: options of PipelineOptimizer, off by default.

u(t) is the step that the wrapped optimizer makes of batch t, with learning rate, moments, clipping
and weight decay. Without a remedy W(t+1) = W(t) + u(t).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..checks import check_number, check_whole_number
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights

Corrected = tuple[torch.Tensor | None, torch.Tensor | None]
"""A tensor to add to a parameter's step, and one to keep until the next step."""


@dataclasses.dataclass(frozen=True)
class LearningRateDiscount:
    """Smaller learning rates at the beginning: PipeMare's technique T1 (arXiv 1910.05124).

        lr(t) / (1 + delay)^p(t),   p(t) = 1 - min(k / num_batches, 1)

    k counts the batches since the warm-up, delay is the stage's. PipeMare divides by delay^p and
    counts a delay of one batch where gradients are up to date; here that is 0, hence 1 + delay. For
    ``"2bw"`` the learning rate begins at a half, which is what its analysis of a quadratic asks
    for: gradient descent with delay d is stable up to (2 / L) sin(pi / (4 d + 2)), 1 / L instead of
    2 / L. Under ``"pipedream"`` every stage has its own delay. ``param_groups`` keep the learning
    rate as the user and the schedulers set it.

    Args:
        num_batches: after this many batches the discount ends.
    """

    num_batches: int

    def divisor(self, delay: int, batches: int) -> float:
        """The number by which a stage's learning rate is divided."""
        return float((1 + delay) ** (1 - min(batches / self.num_batches, 1)))

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the rule and the value."""
        check_whole_number("num_batches", self.num_batches)


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Makes up for each late step when its error is known (arXiv 2606.30634).

        W(t+1) = W(t) + u(t) + coefficient * (u(t) - u(t-1))

    u(t) is made of the gradient at W(t-1): what u(t-1) would have been without the delay, so that
    u(t) - u(t-1) is the error of the step before. A batch without a delay (the first one, or in a
    warm-up) has no error. With w(t) = W(t) - coefficient * u(t-1) it reads w(t+1) = w(t) + u(t):
    plain steps of w, with gradients at the weights w(t) + coefficient * (w(t) - w(t-1)) that are
    predicted for the next batch, as in SpecTrain (arXiv 1809.02839) and linear weight prediction
    (arXiv 2003.11666). Works with every optimizer; keeps one tensor per parameter, u(t-1).

    Args:
        coefficient: > 0.
    """

    coefficient: float = 1.0

    def correct(
        self, step: torch.Tensor | None, kept: torch.Tensor | None, *, stale: bool
    ) -> Corrected:
        """``step`` is None where there was no gradient."""
        if step is None or not stale:
            return None, None
        return None if kept is None else (step - kept) * self.coefficient, step

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the rule and the value."""
        check_number("coefficient", self.coefficient, below=math.inf)


@dataclasses.dataclass(frozen=True)
class NesterovCorrection:
    """Forwards look ahead along a discounted momentum (Ajanthan et al., arXiv 2505.01099).

        w(t+1) = W(t) + (1 - momentum) * u(t)
        W(t+1) = w(t+1) + d(t+1),   d(t+1) = momentum * (w(t+1) - w(t)),   d(0) = 0

    Nesterov's method whose gradients, late as they are, were taken at W: the look-ahead d takes the
    place of the step that a late gradient does not know of, and the factor 1 - momentum keeps each
    such gradient's part small. The paper steps by gradients, u(t) = -lr * g(t); here u may be any
    optimizer's step. Momentum of the optimizer's own comes on top, so give it none: ``SGD`` without
    momentum and a learning rate that is larger by 1 / (1 - momentum), ``AdamW`` with a first beta
    of 0. Evaluation and ``state_dict()`` give W. Keeps one tensor per parameter, d, which
    :meth:`PipelineOptimizer.state_dict` saves.

    Args:
        momentum: in (0, 1).
    """

    momentum: float = 0.9

    def correct(
        self, step: torch.Tensor | None, kept: torch.Tensor | None, *, stale: bool
    ) -> Corrected:
        """``step`` is None where there was no gradient."""
        if step is None:
            return None, kept
        # w(t+1) - w(t) = d(t) + (1 - momentum) * u(t)
        ahead = step * (1 - self.momentum)
        ahead = (ahead if kept is None else ahead + kept) * self.momentum
        return ahead - step * self.momentum, ahead

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the rule and the value."""
        check_number("momentum", self.momentum, below=1.0)


Correction = ErrorFeedback | NesterovCorrection


Remedy = LearningRateDiscount | Correction


class Remedies:
    """The remedies that :class:`PipelineOptimizer` was given.

    Attributes:
        discount, correction: the one of that kind, if there is one.
    """

    def __init__(self, given: Remedy | Sequence[Remedy]) -> None:
        self._given = tuple(given) if isinstance(given, Sequence) else (given,)
        self.discount: LearningRateDiscount | None = next(
            (r for r in self._given if isinstance(r, LearningRateDiscount)), None
        )
        self.correction: Correction | None = next(
            (r for r in self._given if isinstance(r, Correction)), None
        )

    def __bool__(self) -> bool:
        return bool(self._given)

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks."""
        return {"staleness": str(self)}

    def __str__(self) -> str:
        return str(list(self._given))

    def check(
        self,
        session: Session,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scales_loss: bool,
    ) -> None:
        """Raises ValueError or TypeError, naming the rule and both values."""
        for remedy in self._given:
            if not isinstance(remedy, Remedy):
                raise TypeError(
                    f"staleness: {remedy!r} given, it must be a LearningRateDiscount, an "
                    "ErrorFeedback or a NesterovCorrection, or a list of them"
                )
            remedy.check()
        if not self._given:
            return
        for what, kind in (("discounts", LearningRateDiscount), ("corrections", Correction)):
            number = sum(isinstance(remedy, kind) for remedy in self._given)
            if number > 1:
                raise ValueError(f"staleness: {number} {what} given, there may be 1: {self._given}")
        name, delays = session.schedule.name, session.schedule.delay
        tied = [
            name
            for stage in session.stages
            for name in stage.weights.trainable
            if len(stage.weights.stages_of(name)) > 1
        ]
        if self.discount is not None and tied and len(set(delays)) > 1:
            raise ValueError(
                f'staleness: {self.discount}, schedule "{name}": the stages that hold the tied '
                f"parameter {tied[0]} must have one delay, got {list(delays)}: its copies would "
                "make steps of different learning rates"
            )
        if not any(delays):
            raise ValueError(
                f'staleness: {len(self._given)} given, schedule: "{name}": a remedy needs a '
                'schedule with a delay, such as "2bw"'
            )
        if self.correction is not None and set(delays) != {1}:
            raise ValueError(
                f'staleness: {self.correction}, schedule: "{name}" with the delays '
                f"{', '.join(map(str, delays))}: it corrects a delay of 1 on every stage"
            )
        precision = session.stages.options.precision.dtype
        if self.correction is not None and (scales_loss or precision not in (None, torch.float32)):
            raise ValueError(
                f"staleness: {self.correction}, loss_scale: {scales_loss}, precision: {precision}: "
                "steps of masters, and steps that may be left out, are not corrected"
            )
        for number, optimizer in enumerate(optimizers if self.discount is not None else ()):
            if any("lr" not in group for group in optimizer.param_groups):
                raise ValueError(
                    f"staleness: {self.discount}, optimizer {number} "
                    f'({type(optimizer).__name__}): a group without "lr", it must have one'
                )


class StepCorrection:
    """Corrects the steps of one stage, after the optimizer has made them.

    Args:
        rule: the remedy.
    """

    def __init__(self, rule: Correction, stage: StageWeights) -> None:
        self._rule = rule
        self._stage = stage
        self._kept: dict[int, torch.Tensor] = {}  # by parameter

    def nbytes(self) -> int:
        """Bytes that it keeps from one step to the next."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def apply(self, slot: int, *, stale: bool) -> None:
        """Within an update: W(t) is the newest version, W(t) + u(t) is in ``slot``.

        Args:
            stale: whether the batch read an older version than W(t).
        """
        engine = self._stage.engine
        for i in range(len(self._stage.handles)):
            after = engine.weight(slot, i)
            step = after - engine.weight(engine.newest_slot, i) if engine.has_gradient(i) else None
            before = self._kept.pop(i, None)
            if before is not None:
                _C.use_here([before])  # after a load it has memory of the caller's stream
            change, kept = self._rule.correct(step, before, stale=stale)
            if change is not None:
                after.add_(change)
            if kept is not None:
                self._kept[i] = kept

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors to save, by the parameters' names."""
        names = list(self._stage.trainable)
        return {names[i]: tensor for i, tensor in self._kept.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what :meth:`state` gave; of parameters that are not there nothing is known.

        Raises:
            ValueError: a tensor has another shape than its parameter.
        """
        loaded = {}
        for i, (name, handle) in enumerate(self._stage.trainable.items()):
            if name in state:
                if state[name].shape != handle.shape:
                    raise ValueError(
                        f"staleness of {name}: shape {list(state[name].shape)}, the parameter has "
                        f"{list(handle.shape)}: they must be equal"
                    )
                loaded[i] = state[name].to(handle, copy=True)
        self._kept = loaded
