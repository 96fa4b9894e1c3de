"""The options of PipelineOptimizer, as a table, and what they do not go together with."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ..rules import BOOL, Kind, exclusions, instance, number, option
from ..runtime.extension import Extension
from .fused import fused_kind
from .loss_scale import LossScale
from .staleness import (
    ErrorFeedback,
    LearningRateDiscount,
    NesterovCorrection,
    Remedies,
    Remedy,
)


# ruff: noqa: RUF009  # option() makes a field, as dataclasses.field() does
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The options of :class:`PipelineOptimizer`, as they were given there.

    Extensions are checked one by one, and say themselves what ranks must agree on.
    """

    max_grad_norm: float | None = option(None, number(or_none=True))
    norm_type: float = option(2.0, number())
    clip_grad_value: float | None = option(None, number(or_none=True))
    loss_scale: LossScale | None = option(
        None,
        instance("a LossScale or None", LossScale, type(None)),
        saved=True,
        examples=(LossScale(),),
    )
    staleness: Remedy | Sequence[Remedy] = option(
        (),
        Kind("a remedy, or a list of them", lambda name, value: Remedies(value).check()),
        saved=True,
        examples=(LearningRateDiscount(9), ErrorFeedback(), NesterovCorrection()),
    )
    replica_sync: Extension | None = option(agreed=False, saved=True)
    extensions: Sequence[Extension] = option(
        (), instance("a list of extensions", Sequence), agreed=False, saved=True
    )
    shard_state: bool = option(False, BOOL)

    @property
    def needs_norm(self) -> bool:
        """Whether updates need the norm of all gradients.

        A loss scale needs it to know whether any gradient anywhere has overflowed.
        """
        return self.max_grad_norm is not None or self.loss_scale is not None

    def all_extensions(self) -> dict[str, Extension]:
        """The extensions that were given, by the argument that has them."""
        numbered = {f"extensions[{number}]": each for number, each in enumerate(self.extensions)}
        own = {} if self.replica_sync is None else {"replica_sync": self.replica_sync}
        return {**own, **numbered}


class Stepping(NamedTuple):
    """One of the wrapped optimizers, and what parameters it steps here.

    Attributes:
        dtypes: of the parameters.
        has_shards: whether some are one process's part of a tensor-parallel stage's parameter.
    """

    optimizer: torch.optim.Optimizer
    dtypes: Collection[torch.dtype]
    has_shards: bool = False

    def __repr__(self) -> str:
        dtypes = " and ".join(sorted(map(str, set(self.dtypes))))
        return f"{type(self.optimizer).__name__} of {dtypes or 'no parameters'}"


_EACH_BY_ITSELF = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""torch's optimizers, which step each parameter as if it were the only one."""


_BY_ELEMENT = tuple(name for name in _EACH_BY_ITSELF if name not in ("Adafactor", "Muon"))
"""torch's optimizers whose step of an element looks at no other element."""


def _is_one_of(names: Collection[str], optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in [getattr(torch.optim, name) for name in names]


EXCLUSIONS = exclusions(
    f"""
max_grad_norm: given, clip_grad_value: given |
    gradients are clipped by their norm or by value, not both => leave out one of them
max_grad_norm: given, 'tp' of the mesh: above 1, shards: None |
    nothing tells which parameters are shards of one and which are equal on all
    => give the model to use_local_shards(model, shards={{...}}) first; clip_grad_value works
loss_scale: given, 'tp' of the mesh: above 1, shards: None |
    nothing tells which parameters are shards of one and which are equal on all
    => give the model to use_local_shards(model, shards={{...}}) first
optimizer: not element by element, 'tp' of the mesh: above 1, shards: None |
    it may look at a parameter as a whole, and nothing tells which are shards
    => give the model to use_local_shards(model, shards={{...}}) first
optimizer: of shards but not element by element, 'tp' of the mesh: above 1 |
    it may look at a parameter as a whole, of which each process of a stage has a part
    => it must be one of torch.optim's {", ".join(_BY_ELEMENT)}, and may step all other parameters
loss_scale: given, schedule: of several delays |
    all stages must read one version, whose scale the loss is multiplied by
    => choose a schedule of one delay
staleness: a correction, schedule: of several delays or above 1 |
    it corrects a delay of 1 on every stage
    => choose such a schedule, or a LearningRateDiscount
staleness: a discount, schedule: of several delays, tied parameters: some |
    their copies would make steps of different learning rates
    => their stages must have one delay
staleness: a discount, optimizer: without "lr" in a group |
    it divides learning rates => every group must have an "lr"
staleness: a NesterovCorrection, fresh forwards: True |
    it corrects steps whose gradients are all late => give ErrorFeedback() in its place
staleness: a NesterovCorrection, loss_scale: given |
    it does not correct steps that may be left out => give ErrorFeedback() in its place
staleness: a NesterovCorrection, precision: of 16 bits |
    it does not correct steps of masters => give ErrorFeedback() in its place
optimizer_device: given, staleness: a NesterovCorrection |
    its steps are corrected where the stage is
    => it must be a LearningRateDiscount or an ErrorFeedback, or optimizer_device None
shard_state: True, staleness: a NesterovCorrection |
    it keeps a whole tensor for each parameter
    => it must be a LearningRateDiscount or an ErrorFeedback
split_master: True, optimizer: without a fused pass |
    its step() needs whole masters
    => it must be SGD, Adam or AdamW without step hooks, neither capturable nor differentiable,
    with betas and eps that are numbers
optimizer_device: given, optimizer: without a fused pass |
    on the host one fused pass steps
    => it must be SGD, Adam or AdamW of float32 or float64 without step hooks, neither capturable
    nor differentiable, with betas and eps that are numbers
shard_state: True, optimizer_device: given |
    replicas share out what is where the stages are => it must be None
shard_state: True, schedule: of two pipelines |
    replicas share out a stage, not the copies of one => choose a schedule of one pipeline
shard_state: True, optimizer: none of torch.optim's |
    nothing tells whether it steps each parameter as if it were the only one, as it must where a
    replica steps some alone
    => it must be one of torch.optim's {", ".join(_EACH_BY_ITSELF)}
""",
    {
        "a discount": lambda remedies: remedies.discount is not None,
        "a correction": lambda remedies: remedies.correction is not None,
        "a NesterovCorrection": lambda remedies: isinstance(
            remedies.correction, NesterovCorrection
        ),
        "of 16 bits": lambda precision: precision in ("bf16", "fp16"),
        "without a fused pass": lambda each: fused_kind(each.optimizer, each.dtypes) is None,
        'without "lr" in a group': lambda each: any(
            "lr" not in group for group in each.optimizer.param_groups
        ),
        "none of torch.optim's": lambda each: not _is_one_of(_EACH_BY_ITSELF, each.optimizer),
        "not element by element": lambda each: not _is_one_of(_BY_ELEMENT, each.optimizer),
        "of shards but not element by element": lambda each: (
            each.has_shards and not _is_one_of(_BY_ELEMENT, each.optimizer)
        ),
    },
)
"""What does not go together in PipelineOptimizer, and with PipelineModule's options."""
