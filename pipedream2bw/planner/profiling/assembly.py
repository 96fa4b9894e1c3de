"""Costs of layers from what was measured or worked out of groups and graphs."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from ...capture.captured import values_between
from .group_timing import GroupTimes, Measured
from .layer_groups import Group
from .loss_graph import LossGraph
from .records import Edge, Kept, MicrobatchProfile


def median_of(found: Sequence[Measured]) -> Measured:
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


def shared_out(graph: LossGraph, groups: Sequence[Group], measured: Measured) -> MicrobatchProfile:
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
    return microbatch_of(
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


def microbatch_of(
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
