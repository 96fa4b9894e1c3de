"""What a model's layers take on a device, as the planner reads it: times, bytes, links."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .capture import as_root
from .json_fields import Field, read_document
from .profile_checks import check_profile

FORMAT = "pipedream2bw.profile"
VERSION = 1

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


@dataclasses.dataclass(frozen=True)
class Profile:
    """What :func:`profile` finds out about a model; saved as JSON.

    Attributes:
        model_name: the class of the model.
        parameters: of the model, each with its shape and dtype, in the model's order.
        torch_version: of the torch that ran the model.
        loss: the name of the loss function.
        layers: in the order of execution.
        shared_parameters: parameters that layers apart from each other use; each counts with the
            first of them, and every stage that has one of them has a copy.
        microbatches: with increasing numbers of rows.
        seconds_per_update_byte: of an optimizer's step ("sgd", "momentum", "adamw"), by the bytes
            of the trained parameters.
        seconds_per_action: what the engine adds to every forward and to every backward of a stage.
        links: None in one process, where stages hand values over without a copy.
        all_reduce: (ranks, bytes, seconds) of sums over the first so many ranks.

    Raises:
        ValueError: a field that no profile can have; names it and its value.
    """

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
        check_profile(self)

    @property
    def fingerprint(self) -> str:
        """The same for models with the same parameters and layers."""
        return fingerprint_of(self.parameters, [layer.name for layer in self.layers])

    @property
    def trained_dtypes(self) -> set[str]:
        """Of the parameters that are not frozen, like "torch.float32"."""
        return {line.rpartition(" ")[2] for line in self.parameters if not line.endswith(" frozen")}

    def check_model(
        self, model: nn.Module | Sequence[nn.Module], layers: Sequence[str] | None = None
    ) -> None:
        """Compares the model with the profiled one.

        Args:
            model: what a pipeline is to be made of.
            layers: what ``profiler.layer_names`` gives for it; not compared if None.

        Raises:
            ValueError: names what differs first, in the model and in the profile.
        """
        compared: list[tuple[str, Sequence[str], Sequence[str]]] = [
            ("parameter", describe_parameters(as_root(model)), self.parameters)
        ]
        if layers is not None:
            compared.append(("layer", layers, [layer.name for layer in self.layers]))
        for what, given, profiled in compared:
            for index, (mine, theirs) in enumerate(
                itertools.zip_longest(given, profiled, fillvalue="none")
            ):
                if mine != theirs:
                    raise ValueError(
                        f"profile of another model ({self.model_name}): {what} {index} is "
                        f"{mine} in the model, {theirs} in the profile"
                    )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON, see :meth:`load`."""
        Path(path).write_text(f"{json.dumps(self._document(), indent=1)}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what :meth:`save` wrote, on any machine.

        Raises:
            ValueError: it is no profile, one of another version, or a field was changed into
                nonsense; names the field, its value and the rule.
            OSError: it cannot be read.
        """
        try:
            return _read(Field(read_document(path, FORMAT, VERSION)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def _document(self) -> dict[str, Any]:
        links = None
        if self.links is not None:  # JSON has no infinity
            bandwidth = [
                [None if i == j else value for j, value in enumerate(row)]
                for i, row in enumerate(self.links.bandwidth)
            ]
            links = {"latency": self.links.latency, "bandwidth": bandwidth}
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {
                "name": self.model_name,
                "fingerprint": self.fingerprint,
                "parameters": self.parameters,
            },
            "device": dataclasses.asdict(self.device),
            "torch": self.torch_version,
            "loss": self.loss,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "shared_parameters": [dataclasses.asdict(item) for item in self.shared_parameters],
            "microbatches": [dataclasses.asdict(item) for item in self.microbatches],
            "seconds_per_update_byte": dict(self.seconds_per_update_byte),
            "seconds_per_action": self.seconds_per_action,
            "links": links,
            "all_reduce": self.all_reduce,
        }


def fingerprint_of(parameters: Sequence[str], layers: Sequence[str]) -> str:
    """Of a model with these parameters (see :func:`describe_parameters`) and layers."""
    text = json.dumps([parameters, layers])
    return hashlib.sha256(text.encode()).hexdigest()


def describe_parameters(
    root: nn.Module, dtype_of: Callable[[str, nn.Parameter], torch.dtype] | None = None
) -> tuple[str, ...]:
    """A line for each parameter: name, shape, dtype, and whether it is frozen.

    ``dtype_of`` gives the dtypes that the parameters will have, if they will have others.
    """
    return tuple(
        f"{name} {list(parameter.shape)} "
        f"{parameter.dtype if dtype_of is None else dtype_of(name, parameter)}"
        + ("" if parameter.requires_grad else " frozen")
        for name, parameter in root.named_parameters()
    )


def _read(document: Field) -> Profile:
    names = (
        *("model", "device", "torch", "loss", "layers", "shared_parameters", "microbatches"),
        *("seconds_per_update_byte", "seconds_per_action", "links", "all_reduce"),
    )
    top = dict(zip(names, document.fields(*names), strict=True))
    name, fingerprint, parameters = top["model"].fields("name", "fingerprint", "parameters")
    device_name, device_type, memory_bytes, measured = top["device"].fields(
        "name", "type", "memory_bytes", "measured"
    )
    profile = Profile(
        name.text(),
        parameters.each(Field.text),
        ProfiledDevice(
            device_name.text(), device_type.text(), memory_bytes.whole(), measured.flag()
        ),
        top["torch"].text(),
        top["loss"].text(),
        top["layers"].each(_read_layer),
        top["shared_parameters"].each(_read_shared_parameter),
        top["microbatches"].each(_read_microbatch),
        {kind: item.number() for kind, item in top["seconds_per_update_byte"].entries().items()},
        top["seconds_per_action"].number(),
        None if top["links"].value is None else _read_links(top["links"]),
        top["all_reduce"].each(_read_all_reduce),
    )
    if fingerprint.text() != profile.fingerprint:
        raise ValueError(
            f"model.fingerprint: {fingerprint.value!r}, that of the parameters and layers is "
            f"{profile.fingerprint!r}"
        )
    return profile


def _read_layer(field: Field) -> ProfiledLayer:
    name, parameters, trained, can_cut, repeats = field.fields(
        "name", "parameter_bytes", "trained_bytes", "can_cut_after", "repeats"
    )
    return ProfiledLayer(
        name.text(),
        parameters.whole(),
        trained.whole(),
        can_cut.flag(),
        None if repeats.value is None else repeats.whole(),
    )


def _read_shared_parameter(field: Field) -> SharedParameter:
    parameters, trained, layers = field.fields("parameter_bytes", "trained_bytes", "layers")
    return SharedParameter(parameters.whole(), trained.whole(), layers.each(Field.whole))


def _read_microbatch(field: Field) -> MicrobatchProfile:
    rows, forward, input_grad, weight_grad, activations, kept, spread, edges = field.fields(
        *("rows", "forward", "input_grad", "weight_grad"),
        *("activation_bytes", "kept", "spread", "edges"),
    )
    return MicrobatchProfile(
        rows.whole(),
        forward.each(Field.number),
        input_grad.each(Field.number),
        weight_grad.each(Field.number),
        activations.each(Field.whole),
        kept.each(_read_kept),
        spread.each(Field.number),
        edges.each(_read_edge),
    )


def _read_edge(field: Field) -> Edge:
    producer, consumer, size = field.each(Field.whole, length=3)
    return producer, consumer, size


def _read_kept(field: Field) -> Kept:
    size, layers = field.each(lambda item: item, length=2)
    return size.whole(), layers.each(Field.whole)


def _read_links(field: Field) -> ProfiledLinks:
    latency, bandwidth = field.fields("latency", "bandwidth")
    return ProfiledLinks(
        latency.each(lambda row: row.each(Field.number)),
        bandwidth.each(
            lambda row: row.each(lambda item: math.inf if item.value is None else item.number())
        ),
    )


def _read_all_reduce(field: Field) -> tuple[int, int, float]:
    ranks, size, seconds = field.each(lambda item: item, length=3)
    return ranks.whole(), size.whole(), seconds.number()
