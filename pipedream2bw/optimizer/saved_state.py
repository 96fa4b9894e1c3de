"""What of a PipelineOptimizer is saved and loaded, by the parameters' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..ranks.operations import Operation
from ..runtime.extension import Extension, Kept, joined, parted, saved_by
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .fused_state import load_states
from .restriction import example_state, options_of
from .shares import all_shares, forget_others, whole_states
from .state_by_name import (
    STAGES,
    OptimizerSnapshot,
    SharedState,
    StateByName,
    as_state_dict,
    state_of_all,
    states_of_each,
)
from .step_remedies import StepRemedies
from .wrapped import Wrapped

_NOT_BEGUN = "made no step yet: call init_state() before torch.distributed.checkpoint.load()"
"""A key that no saved state has, so that loading it fails, which else would load nothing."""


class SavedState:
    """The state of a pipeline's optimizers, remedies, loss scale and extensions.

    Args:
        extensions: all of the optimizer's, the remedies among them.
    """

    def __init__(
        self,
        session: Session,
        wrapped: Wrapped,
        extensions: Sequence[Extension],
        *,
        remedies: StepRemedies,
        scale: _C.LossScale | None,
    ) -> None:
        self._session, self._wrapped, self._extensions = session, wrapped, extensions
        self._remedies, self._scale = remedies, scale

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PipelineOptimizer.state_dict`."""
        session, wrapped = self._session, self._wrapped
        session.flush_to_read(Operation.optimizer_state_dict)
        wrapped.show_states()
        wrapped.read_counters()
        beside = wrapped.beside()
        with whole_states(session, wrapped.optimizers, wrapped.weights, wrapped.states_on):
            result = state_of_all(wrapped.optimizers, self._names(), wrapped.room, beside)
        if not wrapped.room and wrapped.first_step is None:
            result[_NOT_BEGUN] = True
        if self._scale is not None:
            result["loss_scale"] = {  # as in GradScaler.state_dict()
                "scale": self._scale.of_version(session.accumulation.num_updates),
                "_growth_tracker": self._scale.growth_tracker,
            }
        for extension in self._that_keep():
            kept: Kept = {}
            for weights in wrapped.weights:
                kept |= self._whole(weights, extension.kept(weights))
            result[extension.name] = {**(saved_by(extension) or {}), "kept": joined(kept)}
        return result

    def init_state(self) -> None:
        """See :meth:`PipelineOptimizer.init_state`."""
        remedies = self._remedies
        for extension in self._that_keep():
            is_known = extension.is_known_before_steps
            if not is_known and (extension is not remedies or remedies.remedies.correction):
                raise ValueError(
                    f"init_state: {extension.name}: {extension}: its state cannot be known before "
                    "it is loaded; pipedream2bw.load() can load it"
                )
        self._session.flush_for(Operation.optimizer_state_dict)
        wrapped = self._wrapped
        if wrapped.first_step is None:
            wrapped.make_room(self._names())

    def load(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or a stock optimizer's gave. Drained."""
        wrapped = self._wrapped
        known = self._session.local_model.persistent_names()
        states = states_of_each(state_dict, wrapped.optimizers, self._names(), known)
        wrapped.first_step, wrapped.room, wrapped.room_beside = -1, [], {}
        on_host = self._session.stages.options.optimizer_on_host
        load_states(wrapped.optimizers, states, wrapped.weights, on_host=on_host)
        if self._scale is not None and "loss_scale" in state_dict:
            version, scale = self._session.accumulation.num_updates, state_dict["loss_scale"]
            self._scale.set(version, float(scale["scale"]), int(scale["_growth_tracker"]))
        given = [state_dict] if len(states) == 1 else state_dict["optimizers"]
        wrapped.make_steppers(
            {number: each[STAGES] for number, each in enumerate(given) if STAGES in each}
        )
        for extension in self._extensions:
            state = state_dict.get(extension.name)
            kept = {} if state is None else parted(state["kept"])
            extension.load(state, kept, wrapped.weights)
        wrapped.take_states()
        forget_others(wrapped.optimizers, wrapped.weights)

    def examples(self) -> dict[str, Any]:
        """What checkpoints will have of each optimizer that steps by itself, in kind."""
        wrapped, names = self._wrapped, self._names()
        found: dict[str, Any] = {}
        for optimizer in (wrapped.optimizers[number] for number in wrapped.seen):
            beside, state = example_state(optimizer, wrapped.weights, names) or ({}, {})
            found[type(optimizer).__name__] = {"beside": beside, "state": state}
        return found

    def snapshot(self) -> OptimizerSnapshot:
        """What the last step will leave, to be read when every stage has made it."""
        wrapped = self._wrapped
        extensions = [each for each in self._extensions if saved_by(each) is not None]
        return OptimizerSnapshot(
            optimizers=wrapped.optimizers,
            holders=wrapped.holders(),
            options=[options_of(optimizer.param_groups) for optimizer in wrapped.optimizers],
            seen=wrapped.seen,
            steppers=wrapped.steppers,
            extensions=extensions,
            saved={each.name: saved_by(each) or {} for each in extensions},
            scale=self._scale,
            staleness=str(self._remedies.remedies),
            names=self._names(),
        )

    def load_snapshot(self, shared: SharedState, states: StateByName) -> None:
        """Goes on where a snapshot was made, with this process's part of the state. Drained."""
        self.load(as_state_dict(shared, states, self._session.local_model.tied_names()))
        for version, scale in sorted(shared["loss_scales"].items()):
            assert self._scale is not None
            self._scale.set(version, scale, shared["growth_tracker"])

    def _that_keep(self) -> list[Extension]:
        """The extensions whose state is saved: of remedies only where there are any."""
        kept = [each for each in self._extensions if saved_by(each) is not None]
        return [each for each in kept if each is not self._remedies or self._remedies.remedies]

    def _whole(self, weights: StageWeights, kept: Kept) -> Kept:
        """Copies of what is kept of a stage, with what other replicas keep of it."""
        if weights.engine.is_shared and not self._session.ending.has_failed:
            return all_shares(self._session, weights, kept)
        return {
            name: {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in of_one.items()
            }
            for name, of_one in kept.items()
        }

    def _names(self) -> dict[int, str]:
        """This process's parameters' names, by id."""
        return {id(p): name for name, p in self._session.local_model.named_parameters()}
