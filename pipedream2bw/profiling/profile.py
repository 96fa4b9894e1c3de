"""What a model's layers take on a device, as the planner reads it: times, bytes, links."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..capture.chain import as_root
from ..json_document import Field, read_document
from ..model.fingerprint import describe_parameters, fingerprint_of
from .records import (
    MOST_BYTES,
    MOST_ROWS,
    Edge,
    Kept,
    MicrobatchProfile,
    ProfiledDevice,
    ProfiledLayer,
    ProfiledLinks,
    SharedParameter,
    check_at_least,
    check_layer,
    check_links,
    check_microbatch,
    check_shared,
)

FORMAT = "pipedream2bw.profile"


VERSION = 1


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


def check_profile(profile: Profile) -> None:
    """Raises ValueError that names a field, its value and the rule that it breaks."""
    n = len(profile.layers)
    if not profile.layers:
        raise ValueError("layers: 0, it must be at least 1")
    if not profile.microbatches:
        raise ValueError("microbatches: 0, it must be at least 1")
    check_at_least(0, "device.memory_bytes", [profile.device.memory_bytes], MOST_BYTES)
    for index, layer in enumerate(profile.layers):
        check_layer(f"layers[{index}]", index, layer)
    if profile.layers[-1].can_cut_after:
        raise ValueError(
            f"layers[{n - 1}].can_cut_after: True, it must be False for the last of {n} layers"
        )
    for index, shared in enumerate(profile.shared_parameters):
        check_shared(f"shared_parameters[{index}]", n, shared)
    before = 0
    for index, item in enumerate(profile.microbatches):
        where = f"microbatches[{index}]"
        if item.rows <= before:
            raise ValueError(f"{where}.rows: {item.rows}, it must be more than {before}")
        check_at_least(1, f"{where}.rows", [item.rows], MOST_ROWS)
        before = item.rows
        check_microbatch(where, n, item)
    check_at_least(0, "seconds_per_action", [profile.seconds_per_action])
    for kind, seconds in profile.seconds_per_update_byte.items():
        check_at_least(0, f"seconds_per_update_byte.{kind}", [seconds])
    if profile.links is not None:
        check_links(profile.links)
    for index, (ranks, size, seconds) in enumerate(profile.all_reduce):
        check_at_least(2, f"all_reduce[{index}][0]", [ranks], MOST_ROWS)
        check_at_least(1, f"all_reduce[{index}][1]", [size], MOST_BYTES)
        check_at_least(0, f"all_reduce[{index}][2]", [seconds])
