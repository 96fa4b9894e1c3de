"""The parts of a profile, each with the rule that it keeps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence

Edge = tuple[int, int, int]
"""Producer layer, consumer layer, bytes of the value."""


Kept = tuple[int, tuple[int, ...]]
"""Bytes, and the layers that keep the same tensors, increasing."""


@dataclasses.dataclass(frozen=True)
class ProfiledLayer:
    """A layer of the captured model, whatever the microbatch.

    Attributes:
        name: ``PipelineModule(split=[...])`` takes it.
        parameter_bytes: of the parameters that it is the first to use.
        trained_bytes: the part of them that requires gradients.
        can_cut_after: whether a stage may end here. Always false for the last layer. Where it is
            false although the model could be cut, the layers around were timed together.
        repeats: the first layer that does the same as this one, whose times this one has; None if
            it is the first.
    """

    name: str
    parameter_bytes: int
    trained_bytes: int
    can_cut_after: bool
    repeats: int | None


@dataclasses.dataclass(frozen=True)
class SharedParameter:
    """A parameter of several layers, or several of the same ones.

    Attributes:
        parameter_bytes, trained_bytes: as of a layer.
        layers: that use it, increasing.
    """

    parameter_bytes: int
    trained_bytes: int
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MicrobatchProfile:
    """What the layers take for a microbatch of some number of rows; one number for each layer.

    Attributes:
        rows: of dimension 0 of the model's arguments.
        forward, input_grad, weight_grad: seconds. A backward takes input_grad + weight_grad. The
            loss is in the last layer's.
        activation_bytes: kept from the forward to the end of the backward. What several layers
            keep counts with the first of them; parameters, buffers and the model's inputs do not
            count.
        kept: what several layers keep; on every stage that has one of them it takes memory.
        spread: (90th - 10th percentile) / median of the times that a forward and backward took; 0
            if not measured.
        edges: the values between layers; those of one producer carry the same value. The model's
            inputs count as produced by layer 0.
    """

    rows: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    kept: tuple[Kept, ...]
    spread: tuple[float, ...]
    edges: tuple[Edge, ...]


@dataclasses.dataclass(frozen=True)
class ProfiledDevice:
    """Where the times are from: measured there, or worked out from its figures."""

    name: str
    type: str
    memory_bytes: int
    measured: bool


@dataclasses.dataclass(frozen=True)
class ProfiledLinks:
    """Between every two ranks: a message of n bytes takes latency + n / bandwidth.

    Attributes:
        latency: seconds, [ranks][ranks]; 0 from a rank to itself.
        bandwidth: bytes per second, [ranks][ranks]; infinite from a rank to itself.
    """

    latency: tuple[tuple[float, ...], ...]
    bandwidth: tuple[tuple[float, ...], ...]


MOST_BYTES = 2**63 - 1


MOST_ROWS = 2**31 - 1


def check_layer(where: str, index: int, layer: ProfiledLayer) -> None:
    """Raises ValueError unless the layer is one that a model can have."""
    check_at_least(0, f"{where}.parameter_bytes", [layer.parameter_bytes], MOST_BYTES)
    if not 0 <= layer.trained_bytes <= layer.parameter_bytes:
        raise ValueError(
            f"{where}.trained_bytes: {layer.trained_bytes}, it must be from 0 to parameter_bytes, "
            f"{layer.parameter_bytes}"
        )
    if layer.repeats is not None and not 0 <= layer.repeats < index:
        raise ValueError(f"{where}.repeats: {layer.repeats}, it must be a layer before {index}")


def check_microbatch(where: str, num_layers: int, item: MicrobatchProfile) -> None:
    """Raises ValueError unless every list has a number for each layer."""
    for name in ("forward", "input_grad", "weight_grad", "activation_bytes", "spread"):
        values = getattr(item, name)
        if len(values) != num_layers:
            raise ValueError(f"{where}.{name}: {len(values)} items, layers: {num_layers}")
        most = MOST_BYTES if name == "activation_bytes" else sys.float_info.max
        check_at_least(0, f"{where}.{name}", values, most)
    for index, (producer, consumer, size) in enumerate(item.edges):
        if not 0 <= producer < consumer < num_layers:
            raise ValueError(
                f"{where}.edges[{index}]: from layer {producer} to {consumer}, layers: "
                f"{num_layers}: the producer must come before the consumer"
            )
        check_at_least(0, f"{where}.edges[{index}]", [producer, consumer, size], MOST_BYTES)
    for index, (size, layers) in enumerate(item.kept):
        check_at_least(0, f"{where}.kept[{index}]", [size], MOST_BYTES)
        _check_holders(f"{where}.kept[{index}]", num_layers, layers)


def check_shared(where: str, num_layers: int, item: SharedParameter) -> None:
    """Raises ValueError unless two or more layers share the parameter."""
    check_at_least(0, f"{where}.parameter_bytes", [item.parameter_bytes], MOST_BYTES)
    if not 0 <= item.trained_bytes <= item.parameter_bytes:
        raise ValueError(
            f"{where}.trained_bytes: {item.trained_bytes}, it must be from 0 to parameter_bytes, "
            f"{item.parameter_bytes}"
        )
    _check_holders(where, num_layers, item.layers)


def _check_holders(where: str, num_layers: int, layers: Sequence[int]) -> None:
    rising = all(before < after for before, after in itertools.pairwise(layers))
    if len(layers) < 2 or not rising or not 0 <= layers[0] < layers[-1] < num_layers:
        raise ValueError(
            f"{where}: layers {list(layers)}, layers: {num_layers}: it needs two or more of them, "
            "increasing"
        )


def check_links(links: ProfiledLinks) -> None:
    """Raises ValueError unless latencies and bandwidths are square matrices of legal numbers."""
    n = len(links.latency)
    for name, matrix in (("latency", links.latency), ("bandwidth", links.bandwidth)):
        if len(matrix) != n or any(len(row) != n for row in matrix):
            sizes = [len(row) for row in matrix]
            raise ValueError(f"links.{name}: rows of {sizes} items, ranks: {n}")
    for i, row in enumerate(links.latency):
        check_at_least(0, f"links.latency[{i}]", row)
    for i, row in enumerate(links.bandwidth):
        for j, value in enumerate(row):
            if i == j and value != math.inf:
                raise ValueError(f"links.bandwidth[{i}][{i}]: {value}, it must be infinite")
            if i != j and not 0 < value < math.inf:
                raise ValueError(f"links.bandwidth[{i}][{j}]: {value}, it must be > 0 and finite")


def check_at_least(
    least: int, where: str, values: Iterable[float], most: float = sys.float_info.max
) -> None:
    """Raises ValueError that names the first value below ``least`` or above ``most``."""
    for index, value in enumerate(values):
        if not least <= value <= most:
            rule = "and finite" if most == sys.float_info.max else f"and at most {most}"
            raise ValueError(f"{where}, item {index}: {value}, it must be >= {least} {rule}")
