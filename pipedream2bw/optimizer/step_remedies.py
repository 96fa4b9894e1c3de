"""The remedies for the delay at work: before steps on learning rates, after them on weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _C
from ..runtime.extension import Extension, HeldBytes, Kept, TakenBack, Update
from ..runtime.stage_weights import StageWeights
from .staleness import Remedies
from .step_correction import StepCorrection


class StepRemedies(Extension):
    """Applies remedies to the updates of this process's stages.

    Args:
        delays: of each stage of the schedule.
        warmup_batches: which have no delay.
    """

    name = "staleness"

    def __init__(self, remedies: Remedies, delays: Sequence[int], warmup_batches: int) -> None:
        self.remedies = remedies
        self._delays = delays
        self._warmup_batches = warmup_batches
        self._corrections: dict[int, StepCorrection] = {}  # by stage
        self._delayed_batches = 0  # steps since the warm-up

    def __str__(self) -> str:
        return type(self.remedies.correction).__name__

    def take_over(self, weights: StageWeights) -> None:
        """From now on the stage's steps are corrected. Drained."""
        rule = self.remedies.correction
        if rule is not None:
            weights.ahead = frozenset(weights.rounded)  # from then on: without it they stay ahead
            self._corrections[weights.index] = StepCorrection(rule, weights)

    def divisor(self, stage: int, batch: int, late_share: float) -> float:
        """The divisor of a stage's learning rates in a batch's update.

        Args:
            late_share: of the batch's forwards, those that the schedule has late.
        """
        discount = self.remedies.discount
        if discount is None or batch < self._warmup_batches:
            return 1.0
        return discount.divisor(self._delays[stage] * late_share, self._delayed_batches)

    def fused_options(
        self, update: Update, divisor: float, groups: Sequence[_C.GroupOptions]
    ) -> list[_C.GroupOptions]:
        """Changes the options of the fused passes to those of a stage's update."""
        correction = self._corrections.get(update.weights.index)
        coefficient = 0.0 if correction is None else correction.feedback(update.late_share)
        return [group.with_lr_divided(divisor).with_feedback(coefficient) for group in groups]

    def acts_in(self, update: Update) -> bool:
        """Whether a step is corrected that no fused pass corrects."""
        correction = self._corrections.get(update.weights.index)
        return correction is not None and bool(correction.corrected_here())

    def before_update(self, update: Update, slot: int) -> None:
        self._corrections[update.weights.index].begin(slot, update.late_share)

    def after_update(self, update: Update, slot: int) -> None:
        self._corrections[update.weights.index].apply(slot, update.late_share)

    def step_submitted(self, batch: int) -> None:
        self._delayed_batches += batch >= self._warmup_batches

    def taken_back(self, taken: TakenBack) -> None:
        first = max(taken.batch, self._warmup_batches)
        self._delayed_batches -= max(0, taken.batch + taken.updates - first)

    def bytes_of(self, stage: int) -> HeldBytes:
        correction = self._corrections.get(stage)
        return HeldBytes() if correction is None else HeldBytes(on_device=correction.nbytes())

    def saved(self) -> dict[str, Any]:
        return {"delayed_batches": self._delayed_batches}

    def kept(self, weights: StageWeights) -> Kept:
        correction = self._corrections.get(weights.index)
        if correction is None:
            return {}
        return {name: {"": tensor} for name, tensor in correction.state().items()}

    def load(
        self, saved: Mapping[str, Any] | None, kept: Kept, stages: Sequence[StageWeights]
    ) -> None:
        """Without a state the remedies begin again."""
        self._delayed_batches = 0 if saved is None else int(saved["delayed_batches"])
        for correction in self._corrections.values():
            correction.load({name: of[""] for name, of in kept.items()})
