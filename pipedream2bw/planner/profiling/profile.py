"""What the planner reads of a model on a device: times, bytes and links."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from torch import nn

from ...capture.chain import as_root
from ...checks import check_number, check_whole_number
from ...json_document import Document, Unbounded
from ...model.fingerprint import describe_parameters, fingerprint_of
from ...table import table
from ...units import format_bytes, format_seconds

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
        spread: (third - first quartile) / median of the times that a forward and backward took; 0
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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Profile(Document):
    """What :func:`profile` finds out about a model; saved as JSON.

    Attributes:
        model_name: the class of the model.
        parameters: the model's parameters, each with its shape and dtype, in the model's order.
        device: where the times are from.
        torch_version: the version of the torch that ran the model.
        loss: the name of the loss function.
        layers: the model's layers in the order of execution.
        shared_parameters: parameters that several layers use; each counts with the first of them,
            and every stage that has one of these layers has a copy.
        microbatches: costs of microbatches, with increasing numbers of rows.
        seconds_per_update_byte: seconds of a step of each optimizer ("sgd", "momentum", "adamw"),
            for each byte of the trained parameters; "adamw on host", too, and the others: with the
            copies of gradients and weights, of which the longest part counts.
        seconds_per_action: what the engine adds to every forward and to every backward of a stage.
        links: None in one process, where stages hand values over without a copy.
        all_reduce: (ranks, bytes, seconds) of sums over the first so many ranks.

    Raises:
        ValueError: a field that no profile can have, with its value and the rule.
    """

    FORMAT = "pipedream2bw.profile"
    VERSION = 2

    model_name: str
    parameters: tuple[str, ...]
    device: ProfiledDevice
    torch_version: str
    loss: str
    layers: tuple[ProfiledLayer, ...]
    shared_parameters: tuple[SharedParameter, ...]
    microbatches: tuple[MicrobatchProfile, ...]
    seconds_per_update_byte: Mapping[str, float]
    seconds_per_action: float
    links: ProfiledLinks | None
    all_reduce: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: 0, it must be at least 1")
        if not self.microbatches:
            raise ValueError("microbatches: 0, it must be at least 1")
        last = len(self.layers) - 1
        if self.layers[last].can_cut_after:
            raise ValueError(
                f"layers[{last}].can_cut_after: True, it must be False for the last layer"
            )
        for index, layer in enumerate(self.layers):
            if layer.repeats is not None and layer.repeats >= index:
                raise ValueError(
                    f"layers[{index}].repeats: {layer.repeats}, it must be a layer before {index}"
                )
        for index, shared in enumerate(self.shared_parameters):
            check_within(f"shared_parameters[{index}].layers", shared.layers[-1], len(self.layers))
        before = 0
        for index, item in enumerate(self.microbatches):
            if item.rows <= before:
                raise ValueError(
                    f"microbatches[{index}].rows: {item.rows}, it must be more than {before}"
                )
            before = item.rows
            item.check_layers(f"microbatches[{index}]", len(self.layers))
        check_number("seconds_per_action", self.seconds_per_action, at_least=0, below=math.inf)
        for name, value in self.seconds_per_update_byte.items():
            check_number(f"seconds_per_update_byte.{name}", value, at_least=0, below=math.inf)
        for index, (ranks, size, seconds) in enumerate(self.all_reduce):
            check_whole_number(f"all_reduce[{index}][0]", ranks, 2, MOST_ROWS)
            check_whole_number(f"all_reduce[{index}][1]", size, 1, MOST_BYTES)
            check_number(f"all_reduce[{index}][2]", seconds, at_least=0, below=math.inf)

    @property
    def in_words(self) -> str:
        """A line that says of what the profile is, and where it is from."""
        how = "measured on" if self.device.measured else "worked out for"
        size = f"{len(self.layers)} layers, {len(self.parameters)} parameters"
        return f"{self.model_name}: {size}, {how} {self.device.name}"

    def __repr__(self) -> str:
        return f"Profile({self.in_words})"

    def __str__(self) -> str:
        return f"{self.in_words}\n\n{self.table('a microbatch, all layers')}"

    def table(self, title: str) -> str:
        """What all layers take, by rows of a microbatch."""
        rows = [
            [
                f"{each.rows}",
                format_seconds(sum(each.forward)),
                format_seconds(sum(each.input_grad) + sum(each.weight_grad)),
                format_bytes(sum(each.activation_bytes)),
            ]
            for each in self.microbatches
        ]
        return table(title, ("rows", "forward", "backward", "activations"), rows)

    @property
    def fingerprint(self) -> str:
        """A digest that models with the same parameters and layers have in common."""
        return fingerprint_of(self.parameters, [layer.name for layer in self.layers])

    @property
    def trained_dtypes(self) -> set[str]:
        """Dtypes of the parameters that are not frozen, like "torch.float32"."""
        return {line.rpartition(" ")[2] for line in self.parameters if not line.endswith(" frozen")}

    def check_model(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Checks that a model has the parameters of the profiled one; a plan checks its layers.

        Args:
            model: what a pipeline is to be made of.

        Raises:
            ValueError: the first difference, with what the model and the profile have there.
        """
        given = describe_parameters(as_root(model))
        pairs = itertools.zip_longest(given, self.parameters, fillvalue="none")
        for index, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                raise ValueError(
                    f"profile of another model ({self.model_name}): parameter {index} is {mine} in "
                    f"the model, {theirs} in the profile"
                )
