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


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        buffers: qualified names of the buffers of this stage, used and unused.
        layers: indices of the stage's layers in ``Captured.layers``.
        first_layer_name: the stage's first layer, as ``split=`` would name it; None if it has no
            layers.
        home: the device on which the model was captured.
        source: the code.
    """

    index: int
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
        """Makes a function from the stage's input values to its output values, both lists.

        Args:
            root: the captured model or a structural clone of it: its modules are called, its
                parameters and buffers are read.
            device: where the stage runs, if not where the model was captured: constants of the
                program move there.
        """
        device = None if device is None or _same_device(device, self.home) else device
        return self.source.make(
            *(self._resolve(root, item, device) for item in self.source.attributes)
        )

    def _resolve(self, root: nn.Module, attribute: Attribute, device: torch.device | None) -> Any:
        if attribute.kind == "made":
            return attribute.value(root)
        if attribute.kind == "buffer":  # the dictionary: the module may assign another tensor
            return root.get_submodule(attribute.target.rpartition(".")[0])._buffers
        found = attribute.found_in(root)
        if device is None or attribute.kind not in ("constant", "device"):
            return found
        return _moved(found, self.home, device)


def _moved(value: Any, home: torch.device, device: torch.device) -> Any:
    """Moves a constant of the program from the device where it was captured to another one."""
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
    """Without an index a device is the current one of its type, where the model was captured."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)
