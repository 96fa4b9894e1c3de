"""What the caller of PipelineModule sets, and checks of it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._C import Schedule
from ..accelerator import with_index
from ..checks import check_number, check_optimizer_device, check_whole_number
from ..model.metrics import Metric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`PipelineModule`, as they were given there."""

    plan: object  # which the planner reads, as the other two
    num_stages: int | str | None
    num_microbatches: int | Sequence[int] | None
    schedule: str | os.PathLike[str] | Schedule | None
    stages_per_rank: int | None
    example_args: Sequence[Any]
    example_kwargs: Mapping[str, Any] | None
    example_target: object
    profile: object
    split: str | Sequence[str] | None
    width: int | None
    mesh: DeviceMesh | None
    devices: Sequence[torch.device | str] | None
    replicated: Sequence[str]
    dynamic_shapes: bool
    recompute: bool | str | Sequence[bool] | Sequence[str] | None
    accumulate: int
    loss_reduction: str
    normalizer: bool | Callable[[Any], Any]
    metrics: Mapping[str, Metric] | None
    warmup_batches: int
    compile: bool | Mapping[str, Any]
    bucket_cap_mb: float
    replica_sums: str
    precision: str | None
    split_master: bool
    gradient_dtype: torch.dtype | None
    optimizer_device: str | torch.device | None
    autocast: torch.dtype | None
    random: str
    graphs: bool | str
    timeout: float

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks, beside the arrangement's."""
        metrics = list(self.metrics) if isinstance(self.metrics, Mapping) else self.metrics
        names = (
            *("accumulate", "loss_reduction", "replicated", "compile", "bucket_cap_mb"),
            *("precision", "split_master", "autocast", "warmup_batches", "random"),
            *("graphs", "timeout", "optimizer_device", "replica_sums", "gradient_dtype"),
            "dynamic_shapes",
        )
        return {
            **comparable(self, names),
            "normalizer": "a function" if callable(self.normalizer) else str(self.normalizer),
            "metrics": str(metrics),
            "torch version": torch.__version__,
        }


def comparable(owner: object, names: Sequence[str]) -> dict[str, Any]:
    """Returns attributes as ranks compare them: numbers as numbers, anything else as text."""
    values = {name: getattr(owner, name) for name in names}
    return {name: v if isinstance(v, (int, float)) else str(v) for name, v in values.items()}


def check_options(options: Options, loss_fn: object, width: object) -> None:
    """Raises ValueError or TypeError that names the setting and its value."""
    check_whole_number("width", width)
    if options.loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction: {options.loss_reduction!r}, known: 'mean', 'sum'")
    check_normalizer(options)
    if options.random not in ("keyed", "torch"):
        raise ValueError(f"random: {options.random!r}, known: 'keyed', 'torch'")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: {type(loss_fn).__name__} given, it must be callable")
    check_number("timeout", options.timeout, below=math.inf)
    check_number("bucket_cap_mb", options.bucket_cap_mb)
    if options.replica_sums not in ("ordered", "all_reduce"):
        raise ValueError(f"replica_sums: {options.replica_sums!r}, known: 'ordered', 'all_reduce'")
    if isinstance(options.replicated, str):
        raise TypeError(f"replicated: {options.replicated!r} given, it must be a sequence of names")
    check_whole_number("warmup_batches", options.warmup_batches, at_least=0)
    if options.optimizer_device is not None:
        check_optimizer_device(options.optimizer_device)
    if options.dynamic_shapes not in (True, False):
        raise ValueError(f"dynamic_shapes: {options.dynamic_shapes!r}, known: True, False")


def check_normalizer(options: Options) -> None:
    """Raises ValueError or TypeError unless the options go with their normalizer."""
    if callable(options.normalizer):
        if options.accumulate != 1:
            raise ValueError(
                f"normalizer: a function of the target, accumulate: {options.accumulate}: a batch "
                "of several train_steps has several targets, and their number is needed with the "
                "first: normalizer=True, and train_step(..., normalizer=) of the whole batch"
            )
    elif not isinstance(options.normalizer, bool):
        raise TypeError(
            f"normalizer: {options.normalizer!r} given, it must be a bool or a function of the "
            "target"
        )
    if options.normalizer and options.loss_reduction != "sum":
        raise ValueError(
            f"normalizer: {options.normalizer!r}, loss_reduction: {options.loss_reduction!r}: what "
            "is divided by a number of one's own must be sums: loss_reduction='sum'"
        )


def length_of(model: Any) -> int:
    """The number of stages of a list of modules, for which num_stages may be left out."""
    if not isinstance(model, (list, tuple, nn.ModuleList)):
        raise ValueError("num_stages is missing: it may be left out for a list of modules")
    return len(model)


def stage_devices(
    devices: Sequence[torch.device | str] | None,
    num_stages: int,
    num_processes: int,
    model_device: torch.device,
) -> list[torch.device]:
    """The device of every stage."""
    if devices is None:
        return [model_device] * num_stages
    if num_processes > 1:
        raise ValueError(
            f"devices: {list(devices)}, processes: {num_processes}: with one process per stage "
            "move the model to the process's device instead"
        )
    if len(devices) != num_stages:
        raise ValueError(
            f"devices: {len(devices)} given, num_stages: {num_stages}: one for each stage"
        )
    return [with_index(torch.device(device)) for device in devices]


def what_to_recompute(recompute: object, schedule: Schedule) -> tuple[list[bool], tuple[str, ...]]:
    """Whether each stage recomputes its activations, and the blocks that do so by themselves.

    Raises:
        TypeError, ValueError: it is neither a bool, "auto", one bool for each stage nor names.
    """
    d = schedule.depth
    if isinstance(recompute, bool):
        return [recompute] * d, ()
    if recompute == "auto":
        copies = [range(stage, schedule.num_stages, d) for stage in range(d)]
        return [any(schedule.max_in_flight(copy) > 1 for copy in each) for each in copies], ()
    if isinstance(recompute, str):
        raise ValueError(
            f"recompute: {recompute!r}, known: True, False, 'auto'; names of modules are given as "
            "a list"
        )
    items: list[Any] = list(recompute) if isinstance(recompute, Sequence) else [None]
    if items and all(isinstance(item, str) for item in items):
        return [False] * d, tuple(items)
    if not all(isinstance(item, bool) for item in items):
        raise TypeError(
            f"recompute: {recompute!r} given, it must be a bool, 'auto', one bool for each stage "
            "or names of modules"
        )
    if len(items) != d:
        raise ValueError(f"recompute: {len(items)} given, num_stages: {d}: one for each stage")
    return items, ()
