"""How the stages of a pipeline compute, the same on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..model.metrics import Metric
from ..model.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How the stages of a pipeline compute, the same on every rank.

    Attributes:
        loss_fn: gives the loss of a microbatch, from the model's output and the target.
        precision: the dtypes in which stages compute and parameters are kept.
        devices: the device of each stage of the model.
        recompute: for each stage of the model, whether it runs its forwards again.
        recomputes_blocks: whether blocks of layers inside the stages do so by themselves.
        metrics: what is computed beside the loss.
        compile_options: what ``torch.compile`` is given; empty: nothing is compiled.
        bucket_cap_mb: MiB of gradients that replicas add up at once; may be infinite.
        warmup_batches: how many batches are trained without a delay.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor]
    precision: Precision
    devices: Sequence[torch.device]
    recompute: Sequence[bool]
    recomputes_blocks: bool = False
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    compile_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bucket_cap_mb: float = math.inf
    warmup_batches: int = 0

    @property
    def bucket_bytes(self) -> int:
        """``bucket_cap_mb`` in bytes."""
        return int(min(self.bucket_cap_mb * 2**20, 2.0**62))
