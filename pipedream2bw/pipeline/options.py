"""Checks of what the caller sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._C import Schedule
from ..checks import check_number, check_whole_number


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


def bucket_bytes(bucket_cap_mb: float) -> int:
    """``bucket_cap_mb``, which may be infinite, in bytes."""
    return int(min(bucket_cap_mb * 2**20, 2.0**62))
