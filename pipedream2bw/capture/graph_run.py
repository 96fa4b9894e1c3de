"""A run of a captured graph over the model or a clone, which tells what it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .attribute import Attribute
from .operator_calls import OperatorCalls, Recorded


class GraphRun(fx.Interpreter):
    """Runs a graph whose attributes are those of ``root``."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, attribute_of: Callable[[fx.Node], Attribute]
    ) -> None:
        super().__init__(root, graph=graph)
        self._root, self._attribute_of = root, attribute_of
        self._calls = OperatorCalls()
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
        return self.compute(n, *self.fetch_args_kwargs_from_env(n))

    def compute(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a node from the values of its arguments."""
        if node.op == "call_module":
            return self.attribute(node)(*args, **kwargs)
        return getattr(self, node.op)(node.target, args, kwargs)

    def record(self, examples: Sequence[torch.Tensor]) -> None:
        """Runs the graph and remembers what it calls."""
        self._calls.begin(self._root, examples)
        with Recorded(self._calls):
            self._calls.end(pytree.tree_leaves(self.run(*examples)))

    def difference(self, models: OperatorCalls) -> str | None:
        """Says how the graph, once recorded, differs from the model; None if it does not."""
        if any(value._version != version for value, version in self._constants):
            return "it writes in place to a tensor that was made while tracing"
        return self._calls.difference(models)


_MADE_BY_TRACING = "_tensor_constant"
"""What torch.fx calls tensors that a forward makes of nothing that is traced."""
