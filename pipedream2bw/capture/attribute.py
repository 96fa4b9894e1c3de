"""What a graph's nodes, and code generated from them, refer to in the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx, nn

from ..model.local_shards import parameter_at


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Something that code takes from the module it is bound to.

    Attributes:
        kind: "module", "parameter", "buffer", "constant", "device" or "made". A buffer is looked up
            in every call, since a module may assign a new tensor. A constant is ``value``, the same
            for every clone; a device is one that moves with the stage. What is made is
            ``value(clone)``, for this place of a stage alone.
        target: the qualified name.
        value: see ``kind``.
    """

    kind: str
    target: str
    value: Any = None

    def found_in(self, root: nn.Module) -> Any:
        """Returns the module, parameter, buffer or constant, in the model or a clone of it."""
        if self.kind == "module":
            return root.get_submodule(self.target)
        if self.kind == "parameter":
            return parameter_at(root, self.target)
        return root.get_buffer(self.target) if self.kind == "buffer" else self.value


def nodes_with_attributes(layer: fx.Node) -> list[fx.Node]:
    """Returns the nodes through which a layer refers to attributes: itself if it calls a module."""
    called = [layer] if layer.op == "call_module" else []
    return called + [node for node in layer.all_input_nodes if node.op == "get_attr"]
