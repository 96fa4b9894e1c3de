"""Whether optimizers fit a pipeline; every rank raises what one of them finds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..model.reads import Reads
from ..ranks.operations import Announcement, Operation
from ..rules import check_values, refuse, settings
from ..runtime.extension import HOOKS, Extension, check_extensions, saved_by
from ..runtime.session import Session, open_sessions
from ..schedules.load import check_room
from .fused import parameters_of, step_hooks
from .late_forwards import check_tied, late_for
from .options import EXCLUSIONS, OptimizerOptions, Stepping
from .staleness import Remedies


def agreed_session_of(
    optimizers: Sequence[torch.optim.Optimizer], options: OptimizerOptions
) -> Session:
    """The pipeline whose parameters the optimizers hold; raises on all of its ranks or on none."""
    error: Exception | None = None
    session: Session | None = None
    try:
        _check_kinds(optimizers)
        session = _session_of(optimizers)
        _check_parameters(session, optimizers)
        for each in optimizers:
            _check_own_ways(session, each)
        check_values(OptimizerOptions, vars(options))
        extensions = options.all_extensions()
        check_extensions(extensions)
        given = {**vars(options), "staleness": remedies_of(session, options)}
        _check_rules(session, optimizers, given, list(extensions.values()))
        _check_late_forwards(session, options)
        tied = session.stages.joint_updates.tied
        given["staleness"].check_stages(session.schedule.depth, tied)
        for extension in extensions.values():
            extension.check(session, given)
    except (ValueError, TypeError) as raised:
        error = raised
        candidates = open_sessions() if session is None else [session]
        if len(candidates) != 1:  # nobody can tell whom to warn
            raise
        (session,) = candidates

    def announce() -> Announcement:
        if error is not None:
            raise error
        return Announcement()

    with session.ending.failing_closes():
        session.agree(Operation.new_optimizer, session.num_train_steps, announce)
        session.control.together(lambda: None, same=lambda _: _settings(optimizers, options))
    return session


def remedies_of(session: Session, options: OptimizerOptions) -> Remedies:
    """The remedies for the schedule's delay; none where it has none."""
    return Remedies(options.staleness if any(session.schedule.delay) else ())


def _check_late_forwards(session: Session, options: OptimizerOptions) -> None:
    """Raises ValueError if the late forwards do not suit the optimizer's options."""
    slots, schedule = session.stages.options.update_slots, session.schedule
    if slots is not None:
        session.accumulation.check_between_batches("PipelineOptimizer(), with update_slots")
    elif session.has_fresh_forwards:
        check_tied(session)
    if isinstance(slots, int):
        late = late_for(session, slots, has_norm=options.needs_norm)
        check_room(slots, late, schedule.num_microbatches)
        schedule = schedule.with_late_forwards(late)
    elif slots is not None:
        schedule = schedule.with_late_forwards([])  # until the update has been measured
    if options.needs_norm:
        schedule.check_global_updates()


def _settings(
    optimizers: Sequence[torch.optim.Optimizer], options: OptimizerOptions
) -> dict[str, Any]:
    """What must be the same on all ranks."""
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    extensions = options.all_extensions().values()
    same = {
        "optimizer": kinds,
        **settings(options),
        "staleness": str(Remedies(options.staleness)),  # one, or a list of it
        "extensions": [
            (type(each).__name__, each.name, saved_by(each) is not None) for each in extensions
        ],
    }
    for extension in extensions:
        same |= extension.settings()
    return same


def _check_rules(
    session: Session,
    optimizers: Sequence[torch.optim.Optimizer],
    given: Mapping[str, Any],
    extensions: Sequence[Extension],
) -> None:
    """Raises ValueError or TypeError, naming the rule and the values.

    On every device alike, so that what a CPU accepts works elsewhere.
    """
    facts = {
        **session.facts,
        **given,
        "tied parameters": [
            name
            for stage in session.stages
            for name in stage.weights.trainable
            if len(stage.weights.stages_of(name)) > 1
        ],
    }
    for each in stepping(session, optimizers):
        refuse(EXCLUSIONS, {**facts, "optimizer": each})
        for extension in (*session.extensions.at(HOOKS), *extensions):
            refuse(extension.excludes, {**facts, "optimizer": each, extension.name: extension})


def stepping(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> list[Stepping]:
    """The optimizers, with what they step of this process's parameters."""
    parts = session.local_model.parts()
    dtypes: dict[int, torch.dtype] = {}  # by parameter
    cut: set[int] = set()
    for stage in session.stages:
        weights = stage.weights
        keys = [id(original) for original in weights.originals]
        dtypes.update(zip(keys, weights.stepped_dtypes(), strict=True))
        cut.update(key for name, key in zip(weights.trainable, keys, strict=True) if name in parts)
    found = []
    for each in optimizers:
        mine = [id(p) for p in parameters_of(each) if id(p) in dtypes]
        found.append(Stepping(each, [dtypes[key] for key in mine], not cut.isdisjoint(mine)))
    return found


def _check_kinds(optimizers: Sequence[object]) -> None:
    if not optimizers:
        raise TypeError("PipelineOptimizer(): 0 optimizers given, it needs at least 1")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: {name} given, it must be a torch.optim.Optimizer. Give one over "
                "pipe.parameters(), or more one after the other: PipelineOptimizer(first, second)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                f"optimizer: {name} evaluates the loss several times per step through a closure, a "
                "pipeline computes each batch's gradient once. Give another one, such as AdamW"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise TypeError(
                f"optimizer: {name} takes sparse gradients only, a pipeline's are dense: use Adam"
            )
        _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [each for each in arguments if each.default is inspect.Parameter.empty]
        missing = [each.name for each in needed if each.kind not in variadic]
        if missing:
            raise TypeError(
                f"optimizer: {name}.step() needs {', '.join(missing)}, a pipeline calls it without "
                "arguments: each batch's gradient is computed once, in train_step()"
            )


def _check_own_ways(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError or ValueError for what a stage's step of its parameters would leave out."""
    name = type(optimizer).__name__
    step = vars(optimizer).get("step")
    # A learning-rate scheduler wraps it, only to count.
    if step is not None and inspect.unwrap(step) is not inspect.unwrap(type(optimizer).step):
        raise TypeError(
            f"optimizer: step of this {name} was replaced, stages call {name}.step for their own "
            "parameters. Override step() in a class, or register a hook of the step"
        )
    known = {id(optimizer): "the optimizer"}
    known |= {id(m): f"module {n or 'itself'}" for n, m in session.root.named_modules()}
    known |= {id(p): f"parameter {n}" for n, p in session.root.named_parameters()}

    hooks = [("the hook", hook) for hook in step_hooks(optimizer)]
    for where, item in Reads.of(hooks).items():
        if id(item) in known:
            raise ValueError(
                f"a hook of {name}.step knows {known[id(item)]} of the model ({where}): each stage "
                "calls the hook when it has stepped its own parameters, and others may be being "
                "computed with. Use the param_groups of the optimizer that the hook is given"
            )


def _session_of(optimizers: Sequence[torch.optim.Optimizer]) -> Session:
    given = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
    found = []
    for session in open_sessions():
        local = session.local_model
        # Of a process that has nothing to train nothing may be given, or the placeholder.
        is_none = not local.has_trainable and (not given or id(local.placeholder) in given)
        if is_none or any(id(p) in given for _, p in local.named_parameters()):
            found.append(session)
    if len(found) != 1:
        raise ValueError(
            f"the optimizer's parameters belong to {len(found)} open pipelines, they must be "
            "those of exactly one: build it over pipe.parameters() before the pipeline is closed"
        )
    return found[0]


def _check_parameters(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    names = {id(parameter): name for name, parameter in session.local_model.named_parameters()}
    holder: dict[int, str] = {}  # by parameter
    for number, optimizer in enumerate(optimizers):
        here = _called(number, optimizers)
        placeholder = session.local_model.placeholder
        given = [p for p in parameters_of(optimizer) if p is not placeholder]
        foreign = [i for i, parameter in enumerate(given) if id(parameter) not in names]
        if foreign:
            what = _foreign(session, given[foreign[0]])
            raise ValueError(
                f"parameters of {here}: {len(given)}, of them not the pipeline's: {len(foreign)} "
                f"(the first is number {foreign[0]}, {what}): build it over pipe.parameters()"
            )
        for parameter in given:
            if id(parameter) in holder:
                both = f"{holder[id(parameter)]} and in {here}"
                raise ValueError(
                    f"parameter {names[id(parameter)]} is in {both}: it must be in exactly one "
                    "group of one optimizer"
                )
            holder[id(parameter)] = here
    if not any(parameter.requires_grad for parameter in session.root.parameters()):
        raise ValueError("trainable parameters of the pipeline: 0, there must be at least 1")
    trainable = [(name, p) for name, p in session.local_model.named_parameters() if p.requires_grad]
    missing = [name for name, parameter in trainable if id(parameter) not in holder]
    if missing:
        everyone = " and ".join(_called(number, optimizers) for number in range(len(optimizers)))
        raise ValueError(
            f"trainable parameters of the pipeline: {len(trainable)}, missing in {everyone}: "
            f"{len(missing)} ({', '.join(missing[:5])}): set requires_grad=False before building "
            "the pipeline to train without them"
        )


def _called(number: int, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    if len(optimizers) == 1:
        return "the optimizer"
    return f"optimizer {number} ({type(optimizers[number]).__name__})"


def _foreign(session: Session, parameter: nn.Parameter) -> str:
    for name, other in session.root.named_parameters():
        if other is parameter:
            return f"{name} of a stage that another rank runs"
    return f"of shape {list(parameter.shape)}"
