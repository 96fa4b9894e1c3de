"""The remedies for the delay at work: before steps on learning rates, after them on weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..runtime.extension import Extension, HeldBytes, Kept, TakenBack, Update
from ..runtime.stage_weights import StageWeights
from .staleness import Correction, ErrorFeedback, Remedies

log = logging.getLogger(__name__)


class StepCorrection:
    """Corrects the steps of one stage.

    What :class:`ErrorFeedback` adds to a step that one of the engine's fused passes makes, that
    pass adds too. All else is corrected here, after the optimizers have stepped.
    """

    def __init__(self, rule: Correction, stage: StageWeights) -> None:
        self._rule = rule
        self._stage = stage
        self._before: dict[int, torch.Tensor] = {}  # masters, by parameter; within an update
        self._kept: dict[int, torch.Tensor] = {}  # by parameter

    def _is_fused(self, parameter: int) -> bool:
        return isinstance(self._rule, ErrorFeedback) and self._stage.engine.is_fused(parameter)

    def corrected_here(self) -> list[int]:
        """The parameters of this replica whose steps no fused pass corrects."""
        engine = self._stage.engine
        return [
            i for i in range(len(self._stage.handles)) if engine.owns(i) and not self._is_fused(i)
        ]

    def feedback(self, late_share: float) -> float:
        """The coefficient for an update by the engine's fused passes; 0 without feedback."""
        if not isinstance(self._rule, ErrorFeedback):
            return 0.0
        return self._rule.of_stage(self._stage.index_in_model) * late_share

    def nbytes(self) -> int:
        """Bytes that it keeps beside the engine, from one step to the next or within a step."""
        masters = [i for i in self.corrected_here() if i in self._stage.ahead]
        within = sum(4 * self._stage.handles[i].numel() for i in masters)
        return within + sum(tensor.nbytes for tensor in self._kept.values())

    def begin(self, slot: int, late_share: float) -> None:
        """Within an update, before the optimizers' own steps, which change masters in place."""
        engine = self._stage.engine
        for i in self.corrected_here() if late_share else ():
            if i in self._stage.ahead:
                self._before[i] = engine.master(slot, i).clone()

    def apply(self, slot: int, late_share: float) -> None:
        """Within an update: W(t) is the newest version, W(t) + u(t) is in ``slot``.

        Where there are masters, they are w(t+1), and ``slot`` has their roundings.

        Args:
            late_share: of the batch's forwards on the stage, those that read an older version.
        """
        engine = self._stage.engine
        factor = self.feedback(late_share)
        for i in self.corrected_here():
            weight, newest = engine.weight(slot, i), engine.weight(engine.newest_slot, i)
            if i in self._stage.ahead:
                before = self._before.pop(i, None)
                if not engine.has_gradient(i):
                    weight.copy_(newest)
                elif before is not None:
                    master = engine.master(slot, i)
                    weight.copy_(master + (master - before) * factor)
                continue
            step = weight - newest if engine.has_gradient(i) else None
            earlier = self._kept.pop(i, None)
            if earlier is not None:
                _C.use_here([earlier])  # after a load it has memory of the caller's stream
            change, kept = self._rule.correct(step, earlier, factor)
            if change is not None:
                weight.add_(change)
            if kept is not None:
                self._kept[i] = kept

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors to save, by the parameters' names; of this replica's share."""
        found = {}
        for i, name in enumerate(self._stage.trainable):
            kept = self._kept.get(i)
            if self._is_fused(i):
                kept = self._stage.engine.kept_step(i)
            if kept is not None:
                found[name] = kept
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what :meth:`state` gave; of parameters that are not there nothing is known.

        Raises:
            ValueError: a tensor has another shape than its parameter.
        """
        for name, handle in self._stage.trainable.items():
            if name in state and state[name].shape != handle.shape:
                raise ValueError(
                    f"staleness of {name}: shape {list(state[name].shape)}, the parameter has "
                    f"{list(handle.shape)}: they must be equal"
                )
        self._kept = {}
        for i, (name, handle) in enumerate(self._stage.trainable.items()):
            if i in self._stage.ahead:
                if name in state:
                    log.warning(
                        "staleness of %s: a step was kept of it, masters keep none: its error "
                        "feedback begins anew",
                        name,
                    )
            elif self._is_fused(i):
                self._stage.engine.set_kept_step(i, state.get(name))
            elif name in state and self._stage.engine.owns(i):
                self._kept[i] = state[name].to(self._stage.device, handle.dtype, copy=True)


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
