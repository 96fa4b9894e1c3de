"""Remedies for gradients that are a batch late: options of PipelineOptimizer, off by default.

u(t) is the step that the wrapped optimizer makes of batch t, with learning rate, moments, clipping
and weight decay. Without a remedy W(t+1) = W(t) + u(t).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence

import torch

from ..checks import check_number, check_whole_number
from ..runtime.session import Session

Corrected = tuple[torch.Tensor | None, torch.Tensor | None]
"""A tensor to add to a parameter's step, and one to keep until the next step."""


@dataclasses.dataclass(frozen=True)
class LearningRateDiscount:
    """Smaller learning rates at the beginning: PipeMare's technique T1 (arXiv 1910.05124).

        lr(t) / (1 + delay)^p(t),   p(t) = 1 - min(k / num_batches, 1)

    k counts the batches since the warm-up, delay is the stage's: the mean over a batch's forwards,
    where some are fresh. PipeMare divides by delay^p and counts a delay of one batch where
    gradients are up to date; here that is 0, hence 1 + delay. For ``"2bw"`` the learning rate
    begins at a half, which is what its analysis of a quadratic asks for: gradient descent with
    delay d is stable up to (2 / L) sin(pi / (4 d + 2)), 1 / L instead of 2 / L. Under
    ``"pipedream"`` every stage has its own delay. ``param_groups`` keep the learning rate as the
    user and the schedulers set it.

    Args:
        num_batches: after this many batches the discount ends.
    """

    num_batches: int

    def divisor(self, delay: float, batches: int) -> float:
        """The number by which a stage's learning rate is divided."""
        return float((1 + delay) ** (1 - min(batches / self.num_batches, 1)))

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the rule and the value."""
        check_whole_number("num_batches", self.num_batches)


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Makes up for each late step when its error is known (arXiv 2606.30634).

        w(t+1) = w(t) + u(t),   W(t+1) = w(t+1) + c * u(t),   W(0) = w(0)

    c is ``coefficient`` times the share of the batch's forwards that are late on the stage: all,
    but where some are fresh (``"2bw_fresh"``). Stages compute with W; the optimizer makes plain
    steps of w. So gradients are those at weights that are predicted for the next batch. SpecTrain
    (arXiv 1809.02839) and linear weight prediction (arXiv 2003.11666) do so, too. In W alone it
    reads W(t+1) = W(t) + u(t) + c * (u(t) - u(t-1)): u(t) is what u(t-1) would have been without
    the delay, and the difference is the error of the step before. c is 0 in a batch without a delay
    (the first one, or in a warm-up).

    Where 16-bit weights have whole float32 masters, the masters are w, and nothing else is kept:
    the weights are roundings of W. Checkpoints, exports and ``state_dict()`` give w, and evaluation
    computes with its roundings. Other weights are W, also split masters, joined. Then u(t) is made
    at W(t), and one tensor per parameter is kept, u(t-1), which
    :meth:`PipelineOptimizer.state_dict` and checkpoints save. The first late step after one without
    a delay knows no error there: its W(t+1) is W(t) + u(t).

    Works with every optimizer, in one fused pass with the step of SGD, Adam and AdamW. An update
    that a loss scale leaves out changes neither w nor W, nor does one without a gradient change a
    master's parameter. The next step makes up for the last one that there was.

    Args:
        coefficient: > 0; or one for each stage of the model. 1 is the method's. With less than two
            microbatches for each stage 1.5 did better: docs/which_optimizer.md.
    """

    coefficient: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.coefficient, Sequence):
            object.__setattr__(self, "coefficient", tuple(self.coefficient))

    def of_stage(self, stage: int) -> float:
        """The coefficient on a stage of the model."""
        given = self.coefficient
        return given[stage] if isinstance(given, Sequence) else given

    def correct(
        self, step: torch.Tensor | None, kept: torch.Tensor | None, factor: float
    ) -> Corrected:
        """``step`` is None where there was no gradient, ``factor`` 0 where no forward was late."""
        if step is None or factor == 0:
            return None, None
        return None if kept is None else (step - kept) * factor, step

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the rule and the value."""
        given = self.coefficient
        for each in given if isinstance(given, Sequence) else (given,):
            check_number("coefficient", each, below=math.inf)


@dataclasses.dataclass(frozen=True)
class NesterovCorrection:
    """Forwards look ahead along a discounted momentum (Ajanthan et al., arXiv 2505.01099).

        w(t+1) = W(t) + (1 - momentum) * u(t)
        W(t+1) = w(t+1) + d(t+1),   d(t+1) = momentum * (w(t+1) - w(t)),   d(0) = 0

    Nesterov's method whose gradients, late as they are, were taken at W: the look-ahead d takes the
    place of the step that a late gradient does not know of. The factor 1 - momentum keeps each such
    gradient's part small. The paper steps by gradients, u(t) = -lr * g(t); here u may be any
    optimizer's step. Momentum of the optimizer's own comes on top, so give it none: ``SGD`` without
    momentum and a learning rate that is larger by 1 / (1 - momentum), ``AdamW`` with a first beta
    of 0. Evaluation and ``state_dict()`` give W. Keeps one tensor per parameter, d, which
    :meth:`PipelineOptimizer.state_dict` saves.

    Args:
        momentum: in (0, 1).
    """

    momentum: float = 0.9

    def correct(
        self, step: torch.Tensor | None, kept: torch.Tensor | None, factor: float
    ) -> Corrected:
        """``step`` is None where there was no gradient. ``factor`` is error feedback's."""
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

    def __repr__(self) -> str:
        return ", ".join(map(repr, self._given))

    def __str__(self) -> str:
        return str(list(self._given))

    def check_stages(self, num_stages: int, tied: Iterable[Sequence[int]]) -> None:
        """Raises ValueError if there are coefficients for other stages.

        Args:
            tied: stages with parameters in common, whose copies must make equal steps.
        """
        given = getattr(self.correction, "coefficient", 1.0)
        if not isinstance(given, Sequence):
            return
        if len(given) != num_stages:
            raise ValueError(
                f"coefficient: {len(given)} given, num_stages: {num_stages}: one for each stage"
            )
        for stages in tied:
            of_each = [given[i % num_stages] for i in stages]
            if len(set(of_each)) > 1:
                raise ValueError(
                    f"coefficient: {of_each} for the stages {list(stages)}, which have tied "
                    "parameters: they must be equal. Give one number for all of these"
                )

    def check(self) -> None:
        """Raises ValueError or TypeError, naming the rule and the value."""
        for remedy in self._given:
            if not isinstance(remedy, Remedy):
                raise TypeError(
                    f"staleness: {remedy!r} given, it must be a LearningRateDiscount, an "
                    "ErrorFeedback or a NesterovCorrection, or a list of them"
                )
            remedy.check()
        for what, kind in (("discounts", LearningRateDiscount), ("corrections", Correction)):
            number = sum(isinstance(remedy, kind) for remedy in self._given)
            if number > 1:
                raise ValueError(f"staleness: {number} {what} given, there may be 1: {self._given}")


LITTLE_LATE = 0.375
"""Which m = 2d meets under 2bw_fresh. AdamW and Muon then end 1 to 2 % above synchronous training
without a remedy: docs/which_optimizer.md."""

_LOW_BETA1 = 0.95
"""A longer average of gradients feels the delay less: docs/which_optimizer.md."""


def warn_of_delay(
    session: Session,
    optimizers: Sequence[torch.optim.Optimizer],
    remedies: Remedies,
) -> None:
    """Warns on rank 0 of Muon, and of Adam and AdamW with a low beta1, if no remedy is given.

    Beside an optimizer of another kind they are the user's choice.
    """
    schedule, is_measured = session.schedule, session.stages.options.update_slots == "auto"
    if remedies or session.grid.rank != 0 or is_measured or schedule.late_share <= LITTLE_LATE:
        return
    named = [_costly(optimizer) for optimizer in optimizers]
    if None not in named and any(named):
        feedback = (
            "PipelineOptimizer(..., staleness=pipedream2bw.ErrorFeedback()) (of a PipelineTrainer: "
            'pipeline_optimizer={"staleness": ...})'
        )
        better = 'schedule="2bw_fresh"'
        if schedule.has_one_delay:
            enough = f"{better} and 2 microbatches or more for each stage"
            more = "more microbatches" if schedule.has_fresh_forwards else enough
            advice = f"{feedback} makes up for half of that or more, with {more} for nearly all"
        else:
            advice = f"{better} and {feedback} make up for nearly all of that"
        warnings.warn(
            f'{next(filter(None, named))}, schedule: "{schedule.name}": its gradients are late, '
            f"and the loss ends higher than without the delay. {advice}",
            stacklevel=3,  # where the PipelineOptimizer is made
        )


def _costly(optimizer: torch.optim.Optimizer) -> str | None:
    """What a warning calls it; "": there is nothing to say; None: nothing is known of its kind."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Muon):
        return name
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return None
    beta1 = min(float(group["betas"][0]) for group in optimizer.param_groups)
    return f"{name} with beta1 {beta1:g}" if beta1 <= _LOW_BETA1 else ""
