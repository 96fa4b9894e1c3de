"""Corrects the steps of a stage by a remedy for the delay, and keeps what that needs."""

from __future__ import annotations

import logging

import torch

from .. import _C
from ..runtime.stage_weights import StageWeights
from .staleness import Correction, ErrorFeedback

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
        """Bytes that it keeps from one step to the next beside the engine."""
        return sum(tensor.nbytes for tensor in self._kept.values())

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
