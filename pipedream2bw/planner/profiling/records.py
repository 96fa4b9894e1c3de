"""The parts of a profile, each with its own rules: a part that breaks one raises ValueError."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from ...checks import check_number, check_whole_number
from ...json_document import Unbounded

MOST_BYTES = 2**63 - 1
MOST_ROWS = 2**31 - 1

Edge = tuple[int, int, int]
"""Producer layer, consumer layer, bytes of the value."""

Kept = tuple[int, tuple[int, ...]]
"""Bytes, and the layers that keep the same tensors, increasing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledLayer:
    """A layer of the captured model: what does not depend on the microbatch.

    Attributes:
        name: ``PipelineModule(split=[...])`` takes it.
        parameter_bytes: bytes of the parameters that this layer is the first to use.
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

    def __post_init__(self) -> None:
        _check_parameter_bytes(self)
        if self.repeats is not None:
            check_whole_number("repeats", self.repeats, at_least=0)


@dataclasses.dataclass(frozen=True)
class SharedParameter:
    """One or more parameters that the same layers share.

    Attributes:
        parameter_bytes, trained_bytes: as in :class:`ProfiledLayer`.
        layers: the layers that use them, increasing.
    """

    parameter_bytes: int
    trained_bytes: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_parameter_bytes(self)
        _check_sharing("layers", self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchProfile:
    """What a microbatch with a given number of rows costs; lists have an item for each layer.

    Attributes:
        rows: size of dimension 0 of the model's arguments.
        forward, input_grad, weight_grad: seconds. A backward takes input_grad + weight_grad. The
            loss is in the last layer's.
        activation_bytes: bytes kept from the forward to the end of the backward. What several
            layers keep counts with the first of them; parameters, buffers and the model's inputs
            do not count.
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

    def __post_init__(self) -> None:
        check_whole_number("rows", self.rows, at_most=MOST_ROWS)
        for name in ("forward", "input_grad", "weight_grad", "spread"):
            for index, value in enumerate(getattr(self, name)):
                check_number(f"{name}[{index}]", value, at_least=0, below=math.inf)
        for index, size in enumerate(self.activation_bytes):
            check_whole_number(f"activation_bytes[{index}]", size, 0, MOST_BYTES)
        for index, (producer, consumer, size) in enumerate(self.edges):
            if not 0 <= producer < consumer:
                raise ValueError(
                    f"edges[{index}]: from layer {producer} to {consumer}: the producer must come "
                    "before the consumer"
                )
            check_whole_number(f"edges[{index}][2]", size, 0, MOST_BYTES)
        for index, (size, layers) in enumerate(self.kept):
            check_whole_number(f"kept[{index}][0]", size, 0, MOST_BYTES)
            _check_sharing(f"kept[{index}][1]", layers)

    def check_layers(self, where: str, num_layers: int) -> None:
        """Raises ValueError unless the costs are those of so many layers."""
        for name in ("forward", "input_grad", "weight_grad", "activation_bytes", "spread"):
            if (count := len(getattr(self, name))) != num_layers:
                raise ValueError(f"{where}.{name}: {count} items, layers: {num_layers}")
        for index, (_, consumer, _) in enumerate(self.edges):
            check_within(f"{where}.edges[{index}]", consumer, num_layers)
        for index, (_, layers) in enumerate(self.kept):
            check_within(f"{where}.kept[{index}][1]", layers[-1], num_layers)


@dataclasses.dataclass(frozen=True)
class ProfiledDevice:
    """The device whose times a profile has, measured there or worked out from its figures."""

    name: str
    type: str
    memory_bytes: int
    measured: bool

    def __post_init__(self) -> None:
        check_whole_number("memory_bytes", self.memory_bytes, 0, MOST_BYTES)


@dataclasses.dataclass(frozen=True)
class ProfiledLinks:
    """Links between every two ranks: a message of n bytes takes latency + n / bandwidth.

    Attributes:
        latency: seconds, [ranks][ranks]; 0 from a rank to itself.
        bandwidth: bytes per second, [ranks][ranks]; infinite from a rank to itself.
    """

    latency: tuple[tuple[float, ...], ...]
    bandwidth: tuple[tuple[Unbounded, ...], ...]

    def __post_init__(self) -> None:
        n = len(self.latency)
        for name, matrix in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            sizes = [len(row) for row in matrix]
            if sizes != [n] * n:
                raise ValueError(f"{name}: rows of {sizes} items, ranks: {n}")
        for i, j in itertools.product(range(n), repeat=2):
            check_number(f"latency[{i}][{j}]", self.latency[i][j], at_least=0, below=math.inf)
            rate = self.bandwidth[i][j]
            if i != j:
                check_number(f"bandwidth[{i}][{j}]", rate, below=math.inf)
            elif rate != math.inf:
                raise ValueError(f"bandwidth[{i}][{i}]: {rate}, it must be infinite")


def check_within(name: str, layer: int, num_layers: int) -> None:
    """Raises ValueError if a part of a profile names a layer that the profile does not have."""
    if layer >= num_layers:
        raise ValueError(f"{name}: layer {layer}, layers: {num_layers}")


def _check_parameter_bytes(part: ProfiledLayer | SharedParameter) -> None:
    check_whole_number("parameter_bytes", part.parameter_bytes, 0, MOST_BYTES)
    if not 0 <= part.trained_bytes <= part.parameter_bytes:
        raise ValueError(
            f"trained_bytes: {part.trained_bytes}, it must be from 0 to parameter_bytes, "
            f"{part.parameter_bytes}"
        )


def _check_sharing(name: str, layers: Sequence[int]) -> None:
    rising = all(before < after for before, after in itertools.pairwise(layers))
    if len(layers) < 2 or not rising or layers[0] < 0:
        raise ValueError(f"{name}: {list(layers)}, it must be two or more layers, increasing")
