"""PipelineOptimizer: any torch optimizer, stepped by the pipeline when the gradients are there."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .clipping import Clipping, GradNorm
from .control import Announcement, Operation
from .pipeline import PipelineModule, open_pipelines
from .stage_state import StageState

_STATE_NAMES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
_STATE_SWITCH = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}
"""The option without which a parameter has no such state."""


class PipelineOptimizer(torch.optim.Optimizer):
    """Makes ``optimizer`` the optimizer of the pipeline whose parameters it holds.

    It shares the wrapped optimizer's ``param_groups`` and so works with every
    ``torch.optim.lr_scheduler``. ``step()`` registers the update of the last batch with the
    hyper-parameters as they are at that moment; each stage executes it when the batch's gradients
    are complete. SGD, Adam and AdamW run as one fused pass from W(t) to W(t+1) (float32 and
    float64); any other optimizer, and any option that the fused pass lacks (capturable,
    differentiable, tensor learning rates that require grad), steps a copy of W(t).

    Args:
        optimizer: over ``pipe.parameters()``.
        max_grad_norm: before each step all gradients are scaled such that their norm over the whole
            model (all stages, averaged over replicas) is at most this, as
            ``torch.nn.utils.clip_grad_norm_`` does on the unsplit model, to the same bits. Exact
            and without a drain: where a schedule keeps several weight versions, stages go on with
            the next microbatches until the norm is known; with ``"pipedream"``, which reads a
            batch's weights at once on the last stage, they wait for it. ``inf`` only measures.
        norm_type: of that norm; may be ``inf``.
        clip_grad_value: instead, every element is clamped to this distance from 0, as
            ``torch.nn.utils.clip_grad_value_`` does.

    Raises:
        ValueError: parameters that are of no open pipeline, of several, or not all trainable ones
            of the pipeline in exactly one group.
        TypeError: an optimizer that needs a closure (LBFGS), or no torch optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        clip_grad_value: float | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: {type(optimizer).__name__} given, it must be a torch.optim.Optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "optimizer: LBFGS evaluates the loss several times per step through a closure; a "
                "pipeline computes each batch's gradient once"
            )
        self._pipe, clipping = _agreed_pipeline_of(
            optimizer, lambda: Clipping(max_grad_norm, norm_type, clip_grad_value)
        )
        with self._pipe._failing_closes():
            self._pipe._drain()  # updates that were registered are the former optimizer's
            self._norm = clipping.install(self._pipe)
        self._grad_norm: GradNorm | None = None
        self._wrapped = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # The very objects of the wrapped optimizer, so that edits of either are seen by both.
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        states = [stage.state for stage in self._pipe._stages]
        self._kind = _fused_kind(optimizer, states)
        self._steppers: dict[int, _StageStepper] = {}
        self._options = _options_of(self.param_groups)  # as the last step() saw them
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        for state in states:
            # Only the fused pass reads a gradient before it writes the weight there.
            state.engine.rotate(self._kind is not None)
            state.show_newest()
            if self._kind is not None:
                groups = [group_of[id(original)] for original in state.originals]
                state.engine.set_optimizer(self._kind, groups)
            else:
                self._steppers[state.index] = _StageStepper(optimizer, state)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Registers the update of the last ``train_step``'s batch; returns at once.

        Raises:
            ValueError: called twice, or before any ``train_step``.
            TypeError: a closure was given.
        """
        if closure is not None:
            raise TypeError("step(closure): a pipeline computes the gradient in train_step()")
        if self._norm is not None:
            self._grad_norm = GradNorm(self._norm, self._pipe._batch - 1)
        if self._kind is not None:
            options = [_fused_options(self._wrapped, group) for group in self.param_groups]
            self._pipe._submit_updates(
                lambda stage, batch: stage.executor.submit_fused_update(stage.index, batch, options)
            )
        else:
            current = _options_of(self.param_groups)
            groups = _changes(current, self._options)
            # What waits in the engine must not hold the pipeline, so no reference to `self`.
            self._pipe._submit_updates(
                lambda stage, batch: stage.executor.submit_update(
                    stage.index, batch, functools.partial(self._steppers[stage.index].step, groups)
                )
            )
            self._options = current

    @property
    def grad_norm(self) -> GradNorm:
        """The norm of the gradients that the last :meth:`step` uses, before clipping; lazy.

        Raises:
            ValueError: no ``max_grad_norm`` was given, or no step has been made.
        """
        if self._grad_norm is None:
            what = "max_grad_norm: None, it" if self._norm is None else "steps: 0, there"
            raise ValueError(
                f"grad_norm: {what} must be "
                + ("a number (inf only measures)" if self._norm is None else "one before")
            )
        return self._grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine owns the gradients and starts each batch's anew."""

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's ``state_dict`` for this process's parameters. Drains.

        Every rank calls it.
        """
        self._pipe._flush_for(Operation.optimizer_state_dict)
        if self._kind is not None:
            group_of = {id(p): group for group in self.param_groups for p in group["params"]}
            for stage in self._pipe._stages:
                for i, handle in enumerate(stage.state.handles if stage.state.is_shown else ()):
                    self.state[handle] = self._read_state(stage.state, i, group_of[id(handle)])
        else:
            self._read_counters()
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave. Drains. Every rank calls it."""
        self._pipe._flush_for(Operation.optimizer_load_state_dict)
        self._wrapped.load_state_dict(state_dict)
        self.param_groups = self._wrapped.param_groups
        self.state = self._wrapped.state
        self._options = _options_of(self.param_groups)
        for stage in self._pipe._stages:
            if self._kind is None:
                self._steppers[stage.index] = _StageStepper(self._wrapped, stage.state)
                continue
            for i, original in enumerate(stage.state.originals):
                self._write_state(stage.state, i, self.state.get(original, {}))

    def __repr__(self) -> str:
        how = "one fused pass" if self._kind else "its own step on a copy of the weights"
        return f"PipelineOptimizer({how})\n{self._wrapped!r}"

    def _read_counters(self) -> None:
        """Takes over what a stage's optimizer changed in its groups; the pipeline is drained."""
        for stepper in list(self._steppers.values())[:1]:
            for group, theirs, seen in zip(
                self.param_groups, stepper.options(), self._options, strict=True
            ):
                for key, value in theirs.items():
                    by_user = key in seen and _differ(group[key], seen[key])
                    if not by_user and (key not in seen or _differ(value, seen[key])):
                        group[key], seen[key] = value, copy.deepcopy(value)

    def _read_state(
        self, state: StageState, parameter: int, group: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._kind is not None
        count = state.engine.step_count(parameter)
        read: dict[str, Any] = {}
        if self._kind == "adam" and count:
            read["step"] = torch.tensor(float(count))
        for name in _STATE_NAMES[self._kind]:
            # A flat state buffer covers all groups as soon as one of them needs it.
            if name in _STATE_SWITCH and not group[_STATE_SWITCH[name]]:
                continue
            value = state.engine.optimizer_state(name, parameter)
            if value is not None and count:
                read[name] = value
        return read

    def _write_state(self, state: StageState, parameter: int, values: dict[str, Any]) -> None:
        assert self._kind is not None
        for name in _STATE_NAMES[self._kind]:
            value, old = values.get(name), state.engine.optimizer_state(name, parameter)
            if value is None and old is not None:
                value = torch.zeros_like(old)
            if value is not None:
                state.engine.set_optimizer_state(name, parameter, value)
        # SGD has no count of its own; the engine needs to know that the buffer is there.
        default = 1 if values.get("momentum_buffer") is not None else 0
        state.engine.set_step_count(parameter, int(values.get("step", default)))


class _StageStepper:
    """Runs any optimizer's own step for one stage, on a copy of the newest weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, stage: StageState) -> None:
        self._stage = stage
        handle_of = dict(zip(map(id, stage.originals), stage.handles, strict=True))
        # The same optimizer restricted to the stage's parameters; state is shared by parameter.
        # Not copy.copy, for which an optimizer has no attributes beyond groups and state.
        self._part = object.__new__(type(optimizer))
        self._part.__dict__.update(optimizer.__dict__)
        self._part.param_groups = [
            {
                **options,
                "params": [handle_of[id(p)] for p in group["params"] if id(p) in handle_of],
            }
            for group, options in zip(
                optimizer.param_groups, _options_of(optimizer.param_groups), strict=True
            )
        ]
        self._part.state = optimizer.state
        if not stage.is_shown:  # a copy's state has to stay apart from the stage's
            self._part.state = collections.defaultdict(dict)
            for original, handle in zip(stage.originals, stage.handles, strict=True):
                if original in optimizer.state:
                    self._part.state[handle] = copy.deepcopy(optimizer.state[original])

    def options(self) -> list[dict[str, Any]]:
        return _options_of(self._part.param_groups)

    def step(self, groups: list[dict[str, Any]]) -> None:
        """One step after the given changes of options; called by the stage's executor thread."""
        engine = self._stage.engine
        for group, options in zip(self._part.param_groups, groups, strict=True):
            group.update(options)
        slot = engine.copy_newest_to_next()
        for i, handle in enumerate(self._stage.handles):
            handle.data = engine.weight(slot, i)
            gradient = engine.gradient(i).to(handle.dtype) if engine.has_gradient(i) else None
            handle.grad = gradient
        try:
            type(self._part).step(self._part)
        finally:
            for handle in self._stage.handles:
                handle.grad = None


def _options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in groups
    ]


def _changes(current: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the user changed in each group.

    Only that is told to the stages: their optimizers may keep counters in their groups.
    """
    return [
        {key: value for key, value in new.items() if key not in old or _differ(value, old[key])}
        for new, old in zip(current, before, strict=True)
    ]


def _differ(new: Any, old: Any) -> bool:
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        return not torch.equal(new, old)
    return type(new) is not type(old) or bool(new != old)


def _agreed_pipeline_of(
    optimizer: torch.optim.Optimizer, clipping: Callable[[], Clipping]
) -> tuple[PipelineModule, Clipping]:
    """The pipeline whose parameters the optimizer holds, and how its gradients are clipped.

    Raises on all of its ranks or on none.
    """
    error: Exception | None = None
    pipe: PipelineModule | None = None
    how = Clipping()
    try:
        pipe = _pipeline_of(optimizer)
        how = clipping()
        if how.max_grad_norm is not None:
            pipe._schedule.check_global_updates()
    except (ValueError, TypeError) as raised:
        error = raised
        candidates = open_pipelines() if pipe is None else [pipe]
        if len(candidates) != 1:  # nobody can tell whom to warn
            raise
        (pipe,) = candidates

    def announce() -> Announcement:
        if error is not None:
            raise error
        return Announcement()

    with pipe._failing_closes():
        pipe._control.agree(Operation.new_optimizer, pipe._batch, announce)
        settings = {"optimizer": type(optimizer).__name__, **how.settings()}
        pipe._control.agree_on_objects(None, settings)
    return pipe, how


def _pipeline_of(optimizer: torch.optim.Optimizer) -> PipelineModule:
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[int, PipelineModule] = {}
    for pipe in open_pipelines():
        mine = {id(parameter) for parameter in pipe.parameters()}
        if any(id(parameter) in mine for parameter in given):
            found[id(pipe)] = pipe
    if len(found) != 1:
        raise ValueError(
            f"the optimizer's parameters belong to {len(found)} open pipelines, they must be "
            "those of exactly one: build it over pipe.parameters()"
        )
    (pipe,) = found.values()
    _check_parameters(pipe, given)
    return pipe


def _check_parameters(pipe: PipelineModule, given: list[nn.Parameter]) -> None:
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    names[id(pipe._placeholder)] = "(none)"
    foreign = [i for i, parameter in enumerate(given) if id(parameter) not in names]
    if foreign:
        raise ValueError(
            f"parameters of the optimizer: {len(given)}, of them not the pipeline's: "
            f"{len(foreign)} (the first is number {foreign[0]}): build it over pipe.parameters()"
        )
    present = {id(parameter) for parameter in given}
    trainable = [name for name, parameter in pipe.named_parameters() if parameter.requires_grad]
    missing = [
        name
        for name, parameter in pipe.named_parameters()
        if parameter.requires_grad and id(parameter) not in present
    ]
    if missing:
        raise ValueError(
            f"trainable parameters of the pipeline: {len(trainable)}, missing in the optimizer: "
            f"{len(missing)} ({', '.join(missing[:5])}): set requires_grad=False before building "
            "the pipeline to train without them"
        )


def _fused_kind(optimizer: torch.optim.Optimizer, states: list[StageState]) -> str | None:
    """Which fused pass computes what this optimizer computes, if one does."""
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    kind = kinds.get(type(optimizer))
    if kind is None:
        return None
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("differentiable"):
            return None
        if any(isinstance(group.get(key), torch.Tensor) for key in ("betas", "eps")):
            return None
    dtypes = {handle.dtype for state in states for handle in state.handles}
    return kind if dtypes <= {torch.float32, torch.float64} else None


def _fused_options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
    }
    if "betas" in group:
        options["beta1"], options["beta2"] = (float(beta) for beta in group["betas"])
        options["eps"] = float(group["eps"])
        options["amsgrad"] = bool(group["amsgrad"])
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        options["decoupled_weight_decay"] = bool(decoupled)
    else:
        options["momentum"] = float(group["momentum"])
        options["dampening"] = float(group["dampening"])
        options["nesterov"] = bool(group["nesterov"])
    return options
