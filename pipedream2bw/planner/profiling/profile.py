"""What the planner reads of a model on a device: times, bytes and links."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from torch import nn

from ...capture.chain import as_root
from ...checks import check_number, check_whole_number
from ...json_document import Document
from ...model.fingerprint import describe_parameters, fingerprint_of
from .records import (
    MOST_BYTES,
    MOST_ROWS,
    MicrobatchProfile,
    ProfiledDevice,
    ProfiledLayer,
    ProfiledLinks,
    SharedParameter,
    check_within,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    def fingerprint(self) -> str:
        """A digest that models with the same parameters and layers have in common."""
        return fingerprint_of(self.parameters, [layer.name for layer in self.layers])

    @property
    def trained_dtypes(self) -> set[str]:
        """Dtypes of the parameters that are not frozen, like "torch.float32"."""
        return {line.rpartition(" ")[2] for line in self.parameters if not line.endswith(" frozen")}

    def check_model(
        self, model: nn.Module | Sequence[nn.Module], layers: Sequence[str] | None = None
    ) -> None:
        """Checks that a model has the parameters, and the layers, of the profiled one.

        Args:
            model: what a pipeline is to be made of.
            layers: what ``layer_names`` gives for it; not compared if None.

        Raises:
            ValueError: the first difference, with what the model and the profile have there.
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
