"""Whether optimizers fit a pipeline; every rank raises what one of them finds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..ranks.agreement import Announcement, Operation
from ..runtime.extension import RESERVED, Extension, saved_by
from ..runtime.session import Session, open_sessions
from .clipping import Clipping
from .fused import fused_kind, parameters_of
from .shares import check_shares
from .staleness import NesterovCorrection, Remedies


def agreed_session_of(
    optimizers: Sequence[torch.optim.Optimizer],
    clipping: Clipping,
    remedies: Remedies,
    extensions: Mapping[str, Extension],
    shard_state: bool,
) -> Session:
    """The pipeline whose parameters the optimizers hold; raises on all of its ranks or on none."""
    error: Exception | None = None
    session: Session | None = None
    try:
        _check_kinds(optimizers)
        session = _session_of(optimizers)
        _check_parameters(session, optimizers)
        _check_masters(session, optimizers)
        _check_on_host(session, optimizers, remedies)
        clipping.check(session)
        remedies.check(session, optimizers, scales_loss=clipping.loss_scale is not None)
        if not isinstance(shard_state, bool):
            raise TypeError(
                f"shard_state: {type(shard_state).__name__} given, it must be True or False"
            )
        if shard_state:
            check_shares(session, optimizers, remedies)
        _check_extensions(extensions)
        options = {**vars(clipping), "staleness": remedies, "shard_state": shard_state}
        for extension in extensions.values():
            extension.check(session, options)
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
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        settings = {"optimizer": kinds, **dataclasses.asdict(clipping), **remedies.settings()}
        settings["shard_state"] = shard_state
        settings["extensions"] = [
            (type(each).__name__, each.name, saved_by(each) is not None)
            for each in extensions.values()
        ]
        for extension in extensions.values():
            settings |= extension.settings()
        session.control.agree_on_objects(None, settings)
    return session


def _check_extensions(extensions: Mapping[str, Extension]) -> None:
    places: dict[int | str, str] = {}  # of an extension, and of its name
    for place, extension in extensions.items():
        if not isinstance(extension, Extension):
            raise TypeError(
                f"{place}: {type(extension).__name__} given, it must be of a subclass of "
                "pipedream2bw.Extension"
            )
        name = extension.name
        if name and (not name.isidentifier() or name in RESERVED):
            raise ValueError(
                f"{place}: name: {name!r}, it must be an identifier, and none of "
                f"{', '.join(RESERVED)}: state_dict and checkpoints have its state under it"
            )
        if not name and saved_by(extension) is not None:
            raise ValueError(f"{place}: name: {name!r}, what has a state must have a name")
        keys: tuple[int | str, ...] = (id(extension), name) if name else (id(extension),)
        for key in keys:
            if key in places:
                raise ValueError(
                    f"{places[key]} and {place}: {type(extension).__name__}, name: {name!r}, is "
                    "given twice: each must be another extension, of another name"
                )
            places[key] = place


def _check_kinds(optimizers: Sequence[object]) -> None:
    if not optimizers:
        raise TypeError("PipelineOptimizer(): 0 optimizers given, it needs at least 1")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: {name} given, it must be a torch.optim.Optimizer; several are given "
                "one after the other: PipelineOptimizer(first, second)"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                f"optimizer: {name} evaluates the loss several times per step through a closure; a "
                "pipeline computes each batch's gradient once"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise TypeError(
                f"optimizer: {name} takes sparse gradients only, a pipeline's are dense: use Adam"
            )
        missing = _required_arguments(optimizer)
        if missing:
            raise TypeError(
                f"optimizer: {name}.step() needs {', '.join(missing)}, a pipeline calls it without "
                "arguments: each batch's gradient is computed once, in train_step()"
            )


def _required_arguments(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of what the optimizer's step() cannot do without."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        argument.name
        for argument in arguments
        if argument.default is inspect.Parameter.empty and argument.kind not in variadic
    ]


def _session_of(optimizers: Sequence[torch.optim.Optimizer]) -> Session:
    given = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
    found = [
        session
        for session in open_sessions()
        if any(id(p) in given for _, p in session.local_model.named_parameters())
        or _stands_for_none(given, session)
    ]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer's parameters belong to {len(found)} open pipelines, they must be "
            "those of exactly one: build it over pipe.parameters()"
        )
    return found[0]


def _stands_for_none(given: set[int], session: Session) -> bool:
    """Whether the process has nothing to train, and nothing or the placeholder was given."""
    local = session.local_model
    return not local.has_trainable and (not given or id(local.placeholder) in given)


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


def _check_masters(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if session.stages.options.precision.split_master and fused_kind(optimizer, ()) is None:
            raise TypeError(
                f"split_master: True, optimizer: {type(optimizer).__name__}, whose step() needs "
                "whole masters: it must be SGD, Adam or AdamW, neither capturable nor "
                "differentiable, with betas and eps that are numbers"
            )


def _check_on_host(
    session: Session, optimizers: Sequence[torch.optim.Optimizer], remedies: Remedies
) -> None:
    """Refuses optimizers that cannot work on the host, if they are to.

    On every device alike, so that what a CPU accepts works elsewhere.
    """
    if not session.stages.options.optimizer_on_host:
        return
    dtypes = {
        id(original): dtype
        for stage in session.stages
        for original, dtype in zip(
            stage.weights.originals, stage.weights.stepped_dtypes(), strict=True
        )
    }
    for optimizer in optimizers:
        mine = {dtypes[id(p)] for p in parameters_of(optimizer) if id(p) in dtypes}
        if fused_kind(optimizer, mine) is None:
            raise ValueError(
                f'optimizer_device: "cpu", optimizer: {type(optimizer).__name__} of '
                f"{', '.join(map(str, mine))}: on the host one fused pass steps: it must be SGD, "
                "Adam or AdamW of float32 or float64, neither capturable nor differentiable, with "
                "betas and eps that are numbers"
            )
    if isinstance(remedies.correction, NesterovCorrection):
        raise ValueError(
            f'optimizer_device: "cpu", staleness: {remedies.correction}: its steps are corrected '
            "where the stage is: it must be a LearningRateDiscount or an ErrorFeedback, or "
            "optimizer_device None"
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


def common_defaults(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The options that all have, for schedulers that ask whether they can set them."""
    first, *rest = (optimizer.defaults for optimizer in optimizers)
    return {key: first[key] for key in first if all(key in other for other in rest)}
