"""Checks of what the caller sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ._C import Schedule
from .aliases import check_aliases, check_views
from .local_shards import is_dtensor


def length_of(model: Any) -> int:
    """The number of stages of a list of modules, for which num_stages may be left out."""
    if not isinstance(model, (list, tuple, nn.ModuleList)):
        raise ValueError("num_stages is missing: it may be left out for a list of modules")
    return len(model)


def check_settings(
    width: object,
    loss_fn: object,
    loss_reduction: str,
    timeout: float,
    replicated: Sequence[str],
    bucket_cap_mb: float,
) -> None:
    """Raises ValueError or TypeError that names the setting and its value."""
    check_whole_number("width", width)
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction: {loss_reduction!r}, known: 'mean', 'sum'")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: {type(loss_fn).__name__} given, it must be callable")
    check_number("timeout", timeout, below=math.inf)
    check_number("bucket_cap_mb", bucket_cap_mb)
    if isinstance(replicated, str):
        raise TypeError(f"replicated: {replicated!r} given, it must be a sequence of names")


def check_example(args: object, kwargs: object) -> None:
    """Raises TypeError unless these are a tuple of arguments and a mapping."""
    if not isinstance(args, (tuple, list)):  # a tensor would be taken apart into its rows
        raise TypeError(
            f"example_args: {type(args).__name__} given, it must be a tuple of the positional "
            "arguments: (x,) for one"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"example_kwargs: {type(kwargs).__name__} given, it must be a dict")


def check_parameters(root: nn.Module, loss_fn: object) -> None:
    """Raises ValueError if a parameter has what its copies in the stages would not have."""
    check_aliases(root)
    check_views(root)
    for name, module in root.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            raise ValueError(
                f"module {name or 'itself'}: {type(module).__name__}, it must not be sharded by "
                "FSDP: that frees and gathers the parameters, of which each weight version has its "
                "own memory; shard a stage by tensor parallelism (mesh=) or use more stages"
            )
    for name, parameter in root.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name}: a DTensor, it must be a plain tensor: give the model to "
                "pipedream2bw.use_local_shards() first"
            )
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise ValueError(
                f"parameter {name}: {len(hooks)} hooks on its gradient, they must be none: the "
                "pipeline takes gradients as soon as they exist; use hooks of modules instead"
            )
    if isinstance(loss_fn, nn.Module):
        trainable = [name for name, p in loss_fn.named_parameters() if p.requires_grad]
        if trainable:
            raise ValueError(
                f"loss_fn: {type(loss_fn).__name__} has {len(trainable)} trainable parameters "
                f"({', '.join(trainable[:5])}), it must have none: make them a part of the model"
            )


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
    return [torch.device(device) for device in devices]


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


def check_number(
    name: str, value: object, *, above: float = 0.0, below: float | None = None
) -> None:
    """Raises TypeError unless the value is a number, ValueError unless it is between the two."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r} given, it must be a number")
    if not above < value or not (below is None or value < below):  # nor is NaN
        bounds = {None: "", math.inf: " and finite"}.get(below, f" and < {below}")
        raise ValueError(f"{name}: {value}, it must be > {above:g}{bounds}")


def check_whole_number(name: str, value: object, at_least: int = 1) -> None:
    """Raises TypeError unless the value is an int, ValueError unless it is large enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} given, it must be an int")
    if value < at_least:
        raise ValueError(f"{name}: {value}, it must be at least {at_least}")


def bucket_bytes(bucket_cap_mb: float) -> int:
    """``bucket_cap_mb``, which may be infinite, in bytes."""
    return int(min(bucket_cap_mb * 2**20, 2.0**62))
