"""Profiles a model: measures its layers on a device, or computes them from a device's figures."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...accelerator import module_of
from ...capture.chain import device_type_of
from ...capture.device_figures import DeviceFigures
from ...checks import check_number, check_whole_number
from ...model.fingerprint import describe_parameters
from ...model.sources import sources_kept
from ...model.surroundings import plain_modes
from ...progress import Begin, progress
from ...ranks.agreement import ControlPlane, join
from ...rules import instance
from ...stages.boundaries import values_between
from .doubts import measured_twice_if_doubtful
from .engine_timing import dry_seconds_per_update_byte, seconds_per_action, seconds_per_update_byte
from .group_timing import GroupTimes, Measured, measure_groups
from .layer_groups import Group
from .links import with_links
from .prepared import LossGraph, Prepared, Subject, checked_rows
from .profile import Edge, Kept, MicrobatchProfile, Profile, ProfiledDevice

_FIGURES = instance('DeviceFigures, such as pipedream2bw.KNOWN_DEVICES["v100"]', DeviceFigures)


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
    only a few are timed (see ``profiling/layer_groups.py``). Autograd's hooks for
    saved tensors count the activations. The model does not change. Times that cannot be true, as on
    a busy machine, are measured again; what is no better then is a UserWarning.

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
    given = locals()
    subject = Subject(**{each.name: given[each.name] for each in dataclasses.fields(Subject)})
    if dry is not None:
        _FIGURES.check("dry", dry)
        _check_numbers(parallel, seconds, timeout)
        return _dry_profile(Prepared.of(subject, dry), dry)
    control = join("profile", device_type_of(model, example_args, example_kwargs), timeout)
    try:
        control.together(lambda: _check_numbers(parallel, seconds, timeout))
        return profile_together(control, subject, parallel=parallel, seconds=seconds)
    finally:
        control.close()


def profile_together(
    control: ControlPlane, subject: Subject, *, parallel: int, seconds: float = 2.0
) -> Profile:
    """Measures on all processes that ``control`` has joined; see :func:`profile`."""

    def prepare() -> Prepared:
        prepared = Prepared.of(subject, None)
        if control.size > 1 and parallel != 1:
            raise ValueError(
                f"parallel: {parallel}, processes: {control.size}: with several processes it must "
                "be 1, since all of them measure at the same time"
            )
        return prepared

    prepared = control.together(
        prepare,
        same=lambda made: {
            "microbatch_rows": list(subject.microbatch_rows),
            "parameters": list(describe_parameters(made.root)),
            "seconds": seconds,
            "type of the model's device": made.device.type,
            "layers": [layer.name for layer in made.layers],
        },
    )
    return _measured_profile(prepared, control, seconds, parallel)


def _dry_profile(prepared: Prepared, figures: DeviceFigures) -> Profile:
    microbatches = []
    for graph in prepared.graphs:
        costs = graph.captured.costs
        if unknown := graph.captured.found.unknown:
            raise ValueError(
                f"dry: {figures.name}, layers whose shapes depend on values: "
                f"{', '.join(unknown[:5])}: measure the model instead"
            )
        backward = zip(costs.backward, costs.weight_grad, strict=True)
        microbatches.append(
            _microbatch_of(
                graph,
                forward=costs.forward,
                input_grad=[whole - weight for whole, weight in backward],
                weight_grad=costs.weight_grad,
                activations=costs.saved_bytes,
                kept=costs.kept,
                spread=[0.0] * len(costs.forward),
            )
        )
    return prepared.profile(
        ProfiledDevice(figures.name, figures.type, figures.memory_bytes, measured=False),
        microbatches,
        seconds_per_update_byte=dry_seconds_per_update_byte(figures),
    )


def _measured_profile(
    prepared: Prepared, control: ControlPlane, seconds: float, parallel: int
) -> Profile:
    device, graphs = prepared.device, prepared.graphs

    def measure(begin: Begin, sizes: Sequence[int]) -> list[Measured]:
        """By all ranks at the same time; the medians over them."""

        def measure_here() -> list[Measured]:
            found = []
            for graph in [graphs[size] for size in sizes]:
                begin(f"microbatches of {graph.rows} rows")
                found.append(
                    measure_groups(
                        graph,
                        prepared.root,
                        prepared.groups,
                        device,
                        seconds=seconds,
                        parallel=parallel,
                    )
                )
            return found

        everyone = control.told_by_all(control.together(measure_here), "profiling")
        return [_median_of(found) for found in zip(*everyone, strict=True)]

    with sources_kept(), plain_modes(), progress("profile", len(graphs) + 1) as begin:
        measured = measured_twice_if_doubtful(
            functools.partial(measure, begin),
            [graph.rows for graph in graphs],
            prepared.layers_of_group,
        )
        begin("optimizer steps")
        update = control.together(lambda: seconds_per_update_byte(device))
    with sources_kept():
        action = seconds_per_action(device)
    everyone = control.told_by_all((update, action), "profiling")
    update = {name: statistics.median(each[0][name] for each in everyone) for name in update}
    action = statistics.median(each[1] for each in everyone)
    found = prepared.profile(
        _this_device(device),
        [
            _shared_out(graph, prepared.groups, times)
            for graph, times in zip(graphs, measured, strict=True)
        ],
        seconds_per_update_byte=update,
        seconds_per_action=action,
    )
    if control.group is None:
        return found
    return with_links(found, control.group, device, control.deadline)


def _this_device(device: torch.device) -> ProfiledDevice:
    module: Any = None if device.type == "cpu" else module_of(device.type)
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        return ProfiledDevice(properties.name, device.type, properties.total_memory, measured=True)
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ProfiledDevice(name, device.type, memory, measured=True)


def check_arguments(**arguments: Any) -> None:
    """Raises what :func:`profile` would for arguments that do not depend on the model."""
    defaults = inspect.signature(profile).parameters
    given = {name: each.default for name, each in defaults.items()} | arguments
    checked_rows(given["microbatch_rows"])
    _check_numbers(given["parallel"], given["seconds"], given["timeout"])


def _check_numbers(parallel: int, seconds: float, timeout: float) -> None:
    check_whole_number("parallel", parallel)
    check_number("seconds", seconds, below=math.inf)
    check_number("timeout", timeout, below=math.inf)


# ---------------------------------------------------------------- the costs of layers


def _median_of(found: Sequence[Measured]) -> Measured:
    """The median of what several ranks measured; bytes are the same on all of them."""
    times = {
        like: GroupTimes(
            *(
                statistics.median(getattr(item.times[like], field.name) for item in found)
                for field in dataclasses.fields(GroupTimes)
            )
        )
        for like in found[0].times
    }
    return Measured(times, found[0].saved_bytes, found[0].kept)


def _shared_out(graph: LossGraph, groups: Sequence[Group], measured: Measured) -> MicrobatchProfile:
    """Divides each group's times and bytes among its layers, in proportion to nominal ones."""
    costs = graph.captured.costs
    forward: list[float] = []
    input_grad: list[float] = []
    weight_grad: list[float] = []
    activations: list[int] = []
    spread: list[float] = []
    for group, saved in zip(groups, measured.saved_bytes, strict=True):
        times = measured.times[group.like]
        layers = slice(group.first, group.end)
        weights = costs.weight_grad[layers]
        inputs = [b - w for b, w in zip(costs.backward[layers], weights, strict=True)]
        forward += _parts(times.forward, costs.forward[layers])
        input_grad += _parts(times.input_grad, inputs)
        weight_grad += _parts(times.weight_grad, weights)
        activations += _whole_parts(saved, costs.saved_bytes[layers])
        spread += [times.spread] * len(weights)
    return _microbatch_of(
        graph,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activations=activations,
        kept=[(size, tuple(groups[i].first for i in parts)) for size, parts in measured.kept],
        spread=spread,
    )


def _parts(total: float, shares: Sequence[float]) -> list[float]:
    """``total`` divided in proportion to ``shares``; if these are 0 the last one gets all."""
    if not any(shares):
        return [0.0] * (len(shares) - 1) + [total]
    return [total * share / sum(shares) for share in shares]


def _whole_parts(total: int, shares: Sequence[int]) -> list[int]:
    """``total`` divided like :func:`_parts`, into whole numbers whose sum is ``total``."""
    if not any(shares):
        return [0] * (len(shares) - 1) + [total]
    until = [total * part // sum(shares) for part in itertools.accumulate(shares)]
    return [end - begin for begin, end in itertools.pairwise([0, *until])]


def _microbatch_of(
    graph: LossGraph,
    *,
    forward: Sequence[float],
    input_grad: Sequence[float],
    weight_grad: Sequence[float],
    activations: Sequence[int],
    kept: Sequence[Kept],
    spread: Sequence[float],
) -> MicrobatchProfile:
    """The costs of a graph's layers; those of the loss, the last one, go to the layer before."""
    return MicrobatchProfile(
        rows=graph.rows,
        forward=(*forward[:-2], forward[-2] + forward[-1]),
        input_grad=(*input_grad[:-2], input_grad[-2] + input_grad[-1]),
        weight_grad=(*weight_grad[:-2], weight_grad[-2] + weight_grad[-1]),
        activation_bytes=(*activations[:-2], activations[-2] + activations[-1]),
        kept=_joined(kept, len(forward) - 2),
        spread=tuple(spread[:-1]),
        edges=_edges(graph),
    )


def _joined(kept: Sequence[Kept], last: int) -> tuple[Kept, ...]:
    """Adds up the bytes that the same layers keep; the loss counts as layer ``last``."""
    sizes: dict[tuple[int, ...], int] = {}
    for size, layers in kept:
        holders = tuple(dict.fromkeys(min(layer, last) for layer in layers))
        if len(holders) > 1:
            sizes[holders] = sizes.get(holders, 0) + size
    return tuple((size, layers) for layers, size in sizes.items())


def _edges(graph: LossGraph) -> tuple[Edge, ...]:
    captured = graph.captured
    *nodes, loss = captured.layer_nodes
    sizes = captured.costs.value_bytes
    index_of = {node: index for index, node in enumerate(nodes)}
    last = len(nodes) - 1
    outputs = [
        (index_of[value], last, sizes.get(value.name, 0))
        for value in loss.all_input_nodes
        if index_of.get(value, last) < last
    ]
    edges = [(one, other, sizes.get(value, 0)) for one, other, value in values_between(nodes)]
    return tuple(dict.fromkeys([*edges, *outputs]))
