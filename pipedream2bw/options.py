"""The options of PipelineModule, as a table, and which of them do not go together."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from ._C import Schedule
from .rules import (
    BOOL,
    FUNCTION,
    Kind,
    as_dtype,
    as_name,
    exclusions,
    instance,
    number,
    one_of,
    option,
    whole_number,
)


def _check_replicated(name: str, value: object) -> None:
    if isinstance(value, str):
        raise TypeError(f"{name}: {value!r} given, it must be a sequence of names")


def _check_metrics(name: str, value: Any) -> None:
    instance("a dict of names and functions", Mapping, type(None)).check(name, value)
    for key, function in (value or {}).items():
        instance("a string", str).check(f"{name}: name", key)
        FUNCTION.check(f"{name}[{key!r}]", function)


def _check_optimizer_device(name: str, value: object) -> None:
    instance("a device or None", str, torch.device, type(None)).check(name, value)
    if value is not None and str(value) != "cpu":
        raise ValueError(f"{name}: {str(value)!r}, known: 'cpu', and None for each stage's own")


def _check_update_slots(name: str, value: object) -> None:
    if isinstance(value, str):
        one_of("auto").check(name, value)
    elif value is not None:
        whole_number(at_least=1).check(name, value)


# ruff: noqa: RUF009  # option() makes a field, as dataclasses.field() does
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`PipelineModule`, as they were given there."""

    plan: object = option(agreed=False)
    num_stages: int | str | None = option(saved=True, examples=("auto",))
    num_microbatches: int | Sequence[int] | None = option(saved=True, examples=([2],))
    schedule: str | os.PathLike[str] | Schedule | None = option(saved=True)
    stages_per_rank: int | None = option()
    update_slots: int | str | None = option(
        None, Kind("an int, at least 1, 'auto' or None", _check_update_slots, (1,)), saved=True
    )
    example_args: Sequence[Any] = option(
        (), instance("a tuple of the positional arguments: (x,) for one", tuple, list), agreed=False
    )
    example_kwargs: Mapping[str, Any] | None = option(
        kind=instance("a dict", Mapping, type(None)), agreed=False
    )
    example_target: object = option(agreed=False)
    profile: object = option(agreed=False)
    split: str | Sequence[str] | None = option(
        kind=instance("'auto' or a list of modules' names", Sequence, type(None)), examples=(["1"],)
    )
    width: int | None = option(saved=True, examples=(1,))
    mesh: DeviceMesh | Mapping[str, int] | None = option()
    devices: Sequence[torch.device | str] | None = option(agreed=False, examples=(["cpu"] * 2,))
    replicated: Sequence[str] = option((), Kind("names of arguments", _check_replicated))
    dynamic_shapes: bool = option(False, one_of(True, False))
    recompute: bool | str | Sequence[bool] | Sequence[str] | None = option(examples=(True,))
    accumulate: int = option(1, whole_number(at_least=1))
    loss_reduction: str = option("mean", one_of("mean", "sum"))
    normalizer: bool | Callable[[Any], Any] = option(
        False, instance("a bool or a function of the target", bool, Callable), examples=(True, len)
    )
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = option(
        kind=Kind("a dict of names and functions, or None", _check_metrics)
    )
    warmup_batches: int = option(0, whole_number(at_least=0))
    compile: bool | Mapping[str, Any] = option(
        False,
        instance("a bool or a dict of torch.compile's options", bool, Mapping),
        examples=(True, {"mode": "reduce-overhead"}),
    )
    bucket_cap_mb: float = option(25.0, number())
    replica_sums: str = option("ordered", one_of("ordered", "all_reduce"))
    precision: str | None = option(None, one_of("bf16", "fp16", "fp32", None, kind=str), saved=True)
    split_master: bool = option(False, BOOL)
    gradient_dtype: torch.dtype | None = option(
        None, one_of(torch.bfloat16, None, kind=torch.dtype)
    )
    optimizer_device: str | torch.device | None = option(
        None, Kind("'cpu' or None", _check_optimizer_device, ("cpu",))
    )
    autocast: torch.dtype | None = option(
        None, one_of(torch.bfloat16, torch.float16, None, kind=torch.dtype)
    )
    random: str = option("keyed", one_of("keyed", "torch"), saved=True)
    graphs: bool | str = option(False, one_of(True, False, "auto"))
    timeout: float = option(1800.0, number(below=math.inf))

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", as_name(self.precision))
        for name in ("gradient_dtype", "autocast"):
            object.__setattr__(self, name, as_dtype(getattr(self, name)))


def _makes_graphs_of_torch(compile: Any) -> bool:
    if not isinstance(compile, Mapping):
        return False
    inductors, modes = compile.get("options") or {}, ("reduce-overhead", "max-autotune")
    return compile.get("mode") in modes or bool(inductors.get("triton.cudagraphs"))


PLANNED_EXCLUSIONS = exclusions(
    """
num_microbatches: one for each replica, num_stages: 'auto' |
    it plans for replicas that are alike => give one number for all replicas, or a plan of your
    own, by plan(), which has one for each where devices differ
schedule: of one's own, num_stages: 'auto' |
    it plans for schedules of any size => give a schedule's name
split: given, num_stages: 'auto' |
    the plan says it => leave out split
num_stages: 'auto', devices: none, processes: 1 |
    in one process nothing says where stages are to be => give devices=, one for each stage
""",
    {
        "one for each replica": lambda value: isinstance(value, (list, tuple)),
        "of one's own": lambda value: (
            value is not None and (not isinstance(value, str) or "\n" in value)
        ),
        "none": lambda value: not value,
    },
)
"""What does not go with ``num_stages="auto"``."""

EXCLUSIONS = exclusions(
    """
normalizer: a function, accumulate: above 1 |
    a batch of several train_steps has several targets, and their number is needed with the first
    => give normalizer=True, and train_step(..., normalizer=) of the whole batch
normalizer: given, loss_reduction: not 'sum' |
    what is divided by a number of one's own must be sums => give loss_reduction='sum'
random: 'torch', recompute: some |
    torch's stream cannot be drawn again
    => choose random='keyed', or torch.utils.checkpoint inside the model
compile: given, recompute: some |
    a compiled stage draws random numbers in its own way, which cannot be repeated
    => choose one of them, or torch.utils.checkpoint inside the model
compile: with CUDA graphs, device: of another type than cpu |
    it makes torch's CUDA graphs, of which a run writes over the one before, while several
    microbatches are in flight
    => give graphs=True beside another mode, for graphs of the pipeline's own
graphs: True, recompute: some |
    what a forward does again in the backward is not recorded => 'auto' records what can be
graphs: True, random: 'torch' |
    graphs need random='keyed' => 'auto' records what can be
graphs: True, devices of the stages: some that record no work |
    there are no graphs of such a device => 'auto' records what can be
split_master: True, precision: not 'bf16' |
    it must be 'bf16', whose 16 bits are the upper half of float32
    => give that, or leave out split_master
gradient_dtype: given, precision: not 'bf16' |
    it must be 'bf16', whose weights are of that dtype, beside float32 masters
    => give that, or leave out gradient_dtype
autocast: given, device: without autocast |
    torch has none there => give precision= in place of it
update_slots: given, schedule: of several delays or above 1 |
    an update is hidden behind forwards that are a batch late => choose '2bw_fresh', or such a one
update_slots: given, late forwards of one's own: True |
    the schedule states which forwards are late => leave out one of them
devices: given, processes: above 1 |
    with one process per stage the process's device is the model's => move the model there instead
""",
    {
        "with CUDA graphs": _makes_graphs_of_torch,
        "some that record no work": lambda devices: not all(map(_C.has_device_graphs, devices)),
        "without autocast": lambda device: not torch.amp.is_autocast_available(device.type),
    },
)
"""What does not go together in the constructor."""
