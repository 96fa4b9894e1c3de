"""What a graph's nodes, and code generated from them, refer to in the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Something that code takes from the module it is bound to.

    Attributes:
        kind: "module", "parameter", "buffer" (looked up in every call, since a module may assign a
            new tensor), "constant" (``value``, the same for every clone), "device" (a constant that
            moves with the stage), or "block" (runs the part of a stage that belongs to the module
            ``target``, and runs it again for its backward).
        target: the qualified name.
        value: a constant, or the number of a block.
    """

    kind: str
    target: str
    value: Any = None

    def found_in(self, root: nn.Module) -> Any:
        """Returns the module, parameter, buffer or constant, in the model or a clone of it."""
        if self.kind == "module":
            return root.get_submodule(self.target)
        if self.kind == "parameter":
            return root.get_parameter(self.target)
        return root.get_buffer(self.target) if self.kind == "buffer" else self.value


def nodes_with_attributes(layer: fx.Node) -> list[fx.Node]:
    """Returns the nodes through which a layer refers to attributes: itself if it calls a module."""
    called = [layer] if layer.op == "call_module" else []
    return called + [node for node in layer.all_input_nodes if node.op == "get_attr"]


class GraphRun(fx.Interpreter):
    """Runs a graph whose attributes are those of the model or of a clone of it."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, attribute_of: Callable[[fx.Node], Attribute]
    ) -> None:
        super().__init__(root, graph=graph)
        self._root, self._attribute_of = root, attribute_of
        made = (node for node in graph.nodes if _MADE_BY_TRACING in str(node.target))
        constants = [attribute_of(node).value for node in made if node.op == "get_attr"]
        self._constants = [
            (value, value._version)
            for value in constants
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def attribute(self, node: fx.Node) -> Any:
        """What a get_attr or call_module node refers to."""
        return self._attribute_of(node).found_in(self._root)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node as torch.fx does, but for what its attribute is."""
        if n.op == "get_attr":
            return self.attribute(n)
        if n.op != "call_module":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.attribute(n)(*args, **kwargs)

    @property
    def why_not_repeated(self) -> str | None:
        """Why a further run would compute something else, None if it would not."""
        if any(value._version != version for value, version in self._constants):
            return "it writes in place to a tensor that was made while tracing"
        return None


_MADE_BY_TRACING = "_tensor_constant"
"""What torch.fx calls tensors that a forward makes of nothing that is traced."""
