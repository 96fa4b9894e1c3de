"""Profiles a model: measures its layers on a device, or computes them from a device's figures."""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..capture.chain import as_root, device_type_of
from ..capture.device_figures import NOMINAL, DeviceFigures
from ..checks import check_number, check_whole_number
from ..model.fingerprint import describe_parameters
from ..model.materialize import Example, home_of, is_on_meta
from ..model.refusals import check_example, refuse_untrainable
from ..model.surroundings import plain_modes, random_state_kept
from ..ranks.agreement import ControlPlane, join
from .assembly import median_of, message_bytes, microbatch_of, profile_of, shared_out
from .engine_timing import TRAFFIC, seconds_per_action, seconds_per_update_byte
from .group_timing import Measured, measure_groups
from .links import measure_all_reduce, measure_links
from .prepared import Prepared
from .profile import Profile
from .records import ProfiledDevice, ProfiledLinks


def profile(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    microbatch_rows: Sequence[int] = (1, 2, 4),
    replicated: Sequence[str] = (),
    parallel: int = 1,
    seconds: float = 2.0,
    dry: DeviceFigures | None = None,
    timeout: float = 300.0,
) -> Profile:
    """Measures the seconds and bytes that the layers of ``model`` take, forward and backward.

    The code that stages run is timed on the model's device, in groups of layers between places
    where a stage could begin. The times are medians over rounds, and of groups that do the same
    only a few are timed (see :mod:`pipedream2bw.profiling.layer_groups`). Autograd's hooks for
    saved tensors count the activations. The model does not change.

    Under a process group (or ``torchrun``) all ranks measure at the same time, as stages run. Every
    rank gets the same profile: medians over the ranks, and the links between all of them.

    Args:
        model: as :class:`PipelineModule` takes it, in the mode (train, eval) to profile.
        loss_fn: ``loss_fn(output, target)``; its time is part of the last layer's.
        example_args, example_kwargs: a call of the model with any number of rows >= 1.
        target: of as many rows as the example; any structure.
        microbatch_rows: rows of the microbatches to profile, increasing; the example's rows are cut
            or repeated.
        replicated: as :class:`PipelineModule` takes it.
        parallel: in one process, threads that measure at the same time, each with its share of the
            cores: as many as there will be stages on this machine.
        seconds: how long each number of rows is measured, in at least five rounds.
        dry: a device's figures to compute from: nothing is measured, and no memory is needed. The
            model may be on ``torch.device("meta")``.
        timeout: seconds that a rank waits for another.

    Raises:
        ValueError, TypeError: on every rank, with the rule and both values.
    """
    call: dict[str, Any] = {
        "example_args": example_args,
        "example_kwargs": example_kwargs,
        "target": target,
    }
    if dry is not None:
        _check_numbers(parallel, seconds, timeout)
        prepared, _ = _prepare(model, loss_fn, microbatch_rows, replicated, dry, **call)
        return _dry_profile(prepared, dry)
    control = join("profile", device_type_of(model, example_args, example_kwargs), timeout)
    try:
        control.together(lambda: _check_numbers(parallel, seconds, timeout))
        return profile_together(
            control,
            model,
            loss_fn,
            microbatch_rows=microbatch_rows,
            replicated=replicated,
            parallel=parallel,
            seconds=seconds,
            **call,
        )
    finally:
        control.close()


def profile_together(
    control: ControlPlane,
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    target: Any,
    microbatch_rows: Sequence[int],
    replicated: Sequence[str],
    parallel: int,
    seconds: float = 2.0,
) -> Profile:
    """Measures on all processes that ``control`` has joined; see :func:`profile`."""

    def prepare() -> tuple[Prepared, torch.device]:
        found = _prepare(
            model,
            loss_fn,
            microbatch_rows,
            replicated,
            None,
            example_args=example_args,
            example_kwargs=example_kwargs,
            target=target,
        )
        if control.size > 1 and parallel != 1:
            raise ValueError(
                f"parallel: {parallel}, processes: {control.size}: with several processes it must "
                "be 1, since all of them measure at the same time"
            )
        return found

    prepared, device = control.together(
        prepare,
        same=lambda made: {
            "microbatch_rows": list(microbatch_rows),
            "parameters": list(describe_parameters(made[0].root)),
            "seconds": seconds,
            "type of the model's device": made[1].type,
            "layers": list(made[0].names),
        },
    )
    return _measured_profile(prepared, control, device, seconds, parallel)


def _prepare(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    microbatch_rows: Sequence[int],
    replicated: Sequence[str],
    dry: DeviceFigures | None,
    *,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    target: Any,
) -> tuple[Prepared, torch.device]:
    """The model made ready, and where it is."""
    root = as_root(model)
    example = _checked_example(root, loss_fn, example_args, example_kwargs)
    rows = _checked_rows(microbatch_rows)
    device = home_of(root, example)
    if dry is None and is_on_meta(root):
        raise ValueError(
            "the model is on meta, a measured profile needs weights: give dry= for a profile "
            "from a device's figures"
        )
    prepared = Prepared.of(
        root,
        loss_fn,
        example,
        target=target,
        rows=rows,
        replicated=replicated,
        figures=dry or NOMINAL,
    )
    return prepared, device


def _dry_profile(prepared: Prepared, figures: DeviceFigures) -> Profile:
    microbatches = []
    for graph in prepared.graphs:
        costs = graph.captured.costs
        if costs.unknown:
            raise ValueError(
                f"dry: {figures.name}, layers whose shapes depend on values: "
                f"{', '.join(costs.unknown[:5])}: measure the model instead"
            )
        backward = zip(costs.backward, costs.weight_grad, strict=True)
        microbatches.append(
            microbatch_of(
                graph,
                forward=costs.forward,
                input_grad=[whole - weight for whole, weight in backward],
                weight_grad=costs.weight_grad,
                activations=costs.saved_bytes,
                kept=costs.kept,
                spread=[0.0] * len(costs.forward),
            )
        )
    bandwidth = figures.bytes_per_second * figures.memory_efficiency
    return profile_of(
        prepared,
        ProfiledDevice(figures.name, figures.type, figures.memory_bytes, measured=False),
        microbatches,
        seconds_per_update_byte={name: size / bandwidth for name, size in TRAFFIC.items()},
    )


def _measured_profile(
    prepared: Prepared,
    control: ControlPlane,
    device: torch.device,
    seconds: float,
    parallel: int,
) -> Profile:
    def measure() -> tuple[list[Measured], dict[str, float]]:
        with random_state_kept(), plain_modes():
            found = [
                measure_groups(
                    graph,
                    prepared.root,
                    prepared.groups,
                    device,
                    seconds=seconds,
                    parallel=parallel,
                )
                for graph in prepared.graphs
            ]
            return found, seconds_per_update_byte(device)

    measured, update = control.together(measure)
    with random_state_kept():
        action = seconds_per_action(device)
    links: ProfiledLinks | None = None
    all_reduce: tuple[tuple[int, int, float], ...] = ()
    if control.group is not None:
        everyone: list[Any] = [None] * control.size
        dist.all_gather_object(everyone, (measured, update, action), group=control.group)
        measured = [median_of(found) for found in zip(*(each[0] for each in everyone), strict=True)]
        update = {name: statistics.median(each[1][name] for each in everyone) for name in update}
        action = statistics.median(each[2] for each in everyone)
        size = message_bytes(prepared)
        links = measure_links(control.group, device, size, control.timeout)
        all_reduce = measure_all_reduce(control.group, device, control.timeout)
    microbatches = [
        shared_out(graph, prepared.groups, found)
        for graph, found in zip(prepared.graphs, measured, strict=True)
    ]
    return profile_of(
        prepared,
        _this_device(device),
        microbatches,
        seconds_per_update_byte=update,
        seconds_per_action=action,
        links=links,
        all_reduce=all_reduce,
    )


def _this_device(device: torch.device) -> ProfiledDevice:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return ProfiledDevice(properties.name, "cuda", properties.total_memory, measured=True)
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ProfiledDevice(name, device.type, memory, measured=True)


def _checked_example(
    root: nn.Module,
    loss_fn: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Example:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: {type(loss_fn).__name__} given, it must be callable")
    check_example(args, kwargs)
    refuse_untrainable(root, loss_fn)
    return tuple(args), dict(kwargs or {})


def _checked_rows(rows: Sequence[int]) -> list[int]:
    if not isinstance(rows, (tuple, list)) or not rows:
        raise ValueError(f"microbatch_rows: {rows!r} given, it must be a sequence of numbers")
    for count in rows:
        check_whole_number("microbatch_rows", count)
    for before, count in itertools.pairwise(rows):
        if count <= before:
            raise ValueError(f"microbatch_rows: {count} after {before}, they must increase")
    return list(rows)


def _check_numbers(parallel: int, seconds: float, timeout: float) -> None:
    check_whole_number("parallel", parallel)
    check_number("seconds", seconds, below=math.inf)
    check_number("timeout", timeout, below=math.inf)
