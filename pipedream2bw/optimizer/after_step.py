"""What is done to steps of the optimizers: before them to learning rates, after them to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _C
from ..runtime.discarding import TakenBack
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .own_step import StageStepper, update_with
from .replica_sync import ReplicaSync
from .shares import all_shares
from .stage_sync import StageSync
from .staleness import Remedies
from .step_correction import StepCorrection


class AfterStep:
    """The remedies for the delay, and exchanges between sites, on this process's stages.

    Attributes:
        corrections: of steps, by stage.
        delayed_batches: steps since the warm-up.
    """

    def __init__(
        self, session: Session, remedies: Remedies, replica_sync: ReplicaSync | None
    ) -> None:
        self._session = session
        self._remedies = remedies
        self._sync = replica_sync
        self.corrections: dict[int, StepCorrection] = {}
        self.delayed_batches = 0

    def take_over(self, weights: StageWeights) -> None:
        """From now on the stage's steps are changed as is said here. Drained."""
        rule = self._remedies.correction
        weights.correction_bytes = weights.anchor_bytes = lambda: 0
        if rule is not None:
            correction = self.corrections[weights.index] = StepCorrection(rule, weights)
            weights.correction_bytes = correction.nbytes

    @property
    def keeps_bfloat16(self) -> bool:
        """Whether fused passes round what error feedback keeps of them."""
        rule = self._remedies.correction
        return rule is not None and rule.keeps_bfloat16

    def join_sites(self) -> None:
        """Waits for the other sites, if there are any. Drained; every rank calls it."""
        self._session.local_model.after_load = lambda: None
        if self._sync is not None:
            with self._session.ending.failing_closes():
                self._sync.join(self._session)
            self._session.local_model.after_load = self._sync.weights_loaded

    def begin(self, batch: int) -> None:
        """Before the batch's update is submitted; raises ValueError if sites do not agree."""
        if self._sync is not None:
            self._sync.before_step(batch)

    def divisor(self, stage: int, batch: int) -> float:
        """The divisor of a stage's learning rates in a batch's update."""
        discount = self._remedies.discount
        if discount is None or not self._is_delayed(batch):
            return 1.0
        return discount.divisor(self._session.schedule.delay[stage], self.delayed_batches)

    def fused_options(
        self, stage: LocalStage, batch: int, groups: Sequence[_C.GroupOptions]
    ) -> list[_C.GroupOptions]:
        """Changes the options of the fused passes to those of a stage's update."""
        divisor = self.divisor(stage.index, batch)
        correction = self.corrections.get(stage.index)
        stale = self._is_stale(stage, batch)
        coefficient = 0.0 if correction is None else correction.feedback(stale=stale)
        return [group.with_lr_divided(divisor).with_feedback(coefficient) for group in groups]

    def _is_stale(self, stage: LocalStage, batch: int) -> bool:
        return stage.executor.version_of_batch(stage.index, batch) < batch

    def steps_of(
        self, stage: LocalStage, steppers: Sequence[StageStepper], batch: int
    ) -> Callable[[int], None] | None:
        """Makes what a stage does in a batch's update beside the fused pass; None: nothing."""
        correction = self.corrections.get(stage.index)
        if correction is not None and not correction.corrected_here():
            correction = None
        exchange = None if self._sync is None else self._sync.exchange_of(stage.weights, batch)
        if correction is None and exchange is None and not steppers:
            return None
        divisor, stale = self.divisor(stage.index, batch), self._is_stale(stage, batch)
        return update_with(steppers, batch, divisor, correction, stale=stale, exchange=exchange)

    def count(self, batch: int) -> None:
        """The batch's update has been submitted."""
        self.delayed_batches += self._is_delayed(batch)

    def take_back(self, taken: TakenBack) -> None:
        """Some updates have not been."""
        first = max(taken.batch, self._session.stages.options.warmup_batches)
        self.delayed_batches -= max(0, taken.batch + taken.updates - first)

    def _is_delayed(self, batch: int) -> bool:
        return batch >= self._session.stages.options.warmup_batches

    def state(self) -> dict[str, Any]:
        """The entries of the optimizer's ``state_dict``. Drained; every rank calls it."""
        state = {} if self._sync is None else self._sync.state()
        if self._remedies:
            kept: dict[str, Any] = {}
            for stage in self._session.stages:
                if stage.index in self.corrections:
                    mine = self.corrections[stage.index].state()
                    of_stage = {name: {"kept": tensor} for name, tensor in mine.items()}
                    if stage.weights.engine.is_shared and not self._session.ending.has_failed:
                        of_stage = all_shares(self._session, stage.weights, of_stage)
                    kept |= {name: each["kept"] for name, each in of_stage.items()}
            state["staleness"] = {"delayed_batches": self.delayed_batches, "kept": kept}
        return state

    @property
    def syncs(self) -> Mapping[int, StageSync]:
        """With other sites, by stage."""
        return {} if self._sync is None else self._sync.stages

    def sync_state(self) -> dict[str, Any] | None:
        """What is saved of exchanges beside the stages' parts."""
        return None if self._sync is None else self._sync.shared()

    def check_room(self) -> None:
        """Raises ValueError if its state cannot be known before it is loaded."""
        if self._remedies.correction is not None:
            rule = type(self._remedies.correction).__name__
            raise ValueError(f"init_state: staleness: {rule}; pipedream2bw.load() can, with it")
        if self._sync is not None:
            raise ValueError(
                f"init_state: replica_sync: every: {self._sync.every}; pipedream2bw.load() can, "
                "with it"
            )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what :meth:`state` gave; what was saved without remedies lets them begin again."""
        staleness = state_dict.get("staleness", {"delayed_batches": 0, "kept": {}})
        self.delayed_batches = int(staleness["delayed_batches"])
        for correction in self.corrections.values():
            correction.load(staleness["kept"])
        if self._sync is not None and "replica_sync" in state_dict:
            self._sync.load(state_dict["replica_sync"])
