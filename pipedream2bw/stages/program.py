"""A stage's program: what it takes, gives, holds and computes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.attribute import Attribute
from .codegen import StageFunction, StageSource
from .recompute import Block


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """One stage of a captured model.

    Attributes:
        inputs: names of the values the stage takes, in the order of a call. Stage 0 takes all the
            model's inputs; a later stage takes what others send it.
        receives: producer stage -> names of the values it sends here. A model input is produced by
            stage 0, which passes it on.
        outputs: names of the values a call gives, each once; the last stage gives one value, the
            model's output.
        sends: consumer stage -> names of the values it gets from here; a value with several
            consumers appears in each.
        parameters: qualified names of the parameters this stage uses, frozen ones too. Several
            stages may use one.
        unused_parameters: parameters that the captured mode uses nowhere, kept by this stage so
            that every parameter has a place.
        buffers: the same for buffers, used and unused.
        layers: indices of the layers in ``Captured.layers``.
        home: the device on which the model was captured.
        first_layer_name: what the stage begins with, as ``split=`` would name it; None if it has
            no layers.
    """

    index: int
    num_stages: int
    inputs: tuple[str, ...]
    receives: dict[int, tuple[str, ...]]
    outputs: tuple[str, ...]
    sends: dict[int, tuple[str, ...]]
    parameters: tuple[str, ...]
    unused_parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    layers: range
    first_layer_name: str | None
    home: torch.device
    source: StageSource = dataclasses.field(repr=False)

    def bind(self, root: nn.Module, device: torch.device | None = None) -> StageFunction:
        """The stage as a function from its input values to its output values, as lists.

        Args:
            root: a structural clone of the captured model (or the model): its modules are called,
                its parameters and buffers are read.
            device: where the stage runs, if not where the model was captured: constants of the
                program move there.
        """
        device = None if device is None or _same_device(device, self.home) else device
        return self.source.make(
            *(self._resolve(root, item, device) for item in self.source.attributes)
        )

    def _resolve(self, root: nn.Module, attribute: Attribute, device: torch.device | None) -> Any:
        if attribute.kind == "module":
            return root.get_submodule(attribute.target)
        if attribute.kind == "block":
            return Block(attribute.target, root, device or self.home)
        if attribute.kind == "parameter":
            return root.get_parameter(attribute.target)
        if attribute.kind == "buffer":
            return root.get_submodule(attribute.target.rpartition(".")[0])._buffers
        return attribute.value if device is None else _moved(attribute.value, self.home, device)


def _moved(value: Any, home: torch.device, device: torch.device) -> Any:
    """A constant of the program for another device than the one it was captured on."""
    if isinstance(value, torch.device):
        return device if _same_device(value, home) else value
    if isinstance(value, torch.Tensor):
        return value.to(device) if _same_device(value.device, home) else value
    if isinstance(value, fx.GraphModule):  # a region of an exported program
        region = copy.deepcopy(value).to(device)
        for node in region.graph.nodes:
            node.args, node.kwargs = pytree.tree_map_only(
                torch.device, lambda item: _moved(item, home, device), (node.args, node.kwargs)
            )
        region.recompile()
        return region
    return value


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)
