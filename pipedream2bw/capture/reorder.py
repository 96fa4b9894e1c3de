"""Moving embedding lookups forward, so that one stage can hold all uses of a shared table.

An encoder-decoder model looks the same table up for its encoder and, half a model later, for its
decoder. The later lookup depends on the model's inputs alone, so it may as well happen right after
the first one:

    before   embed(x) | encoder ... encoder | embed(y) | decoder ...     uses are far apart
    after    embed(x)   embed(y) | encoder ... encoder | decoder ...     uses are neighbours

No value changes; the lookups of one table keep their order, so neither does the order in which its
gradients are added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.nn import functional

# What may stand between a model input and a lookup in a graph traced by torch.fx.
_INDEX_METHODS = {
    *("contiguous", "dim", "flatten", "int", "long", "reshape"),
    *("size", "squeeze", "to", "unsqueeze", "view"),
}
_INDEX_FUNCTIONS = {getattr, operator.getitem}


def gather_lookups(
    graph: fx.Graph,
    module_of: Callable[[fx.Node], nn.Module | None],
    parameters_of: Callable[[fx.Node], tuple[str, ...]],
) -> None:
    """Moves every lookup that needs nothing but model inputs right after the table's first use.

    ``module_of`` gives the module of a call_module node (None for others), ``parameters_of`` the
    names of the parameters that a node uses.
    """
    last_use: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        names = parameters_of(node) if node.op.startswith("call_") else ()
        earlier = last_use.get(names[0]) if len(names) == 1 else None
        if earlier is not None and _is_lookup(node, module_of(node)):
            needed = _needed_after(earlier, node, graph, parameters_of)
            if needed is not None:
                anchor = earlier
                for item in needed:
                    anchor.append(item)
                    anchor = item
        for name in names:
            last_use[name] = node


def _is_lookup(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        # max_norm rescales the table in place.
        return type(module) is nn.Embedding and module.max_norm is None
    return node.target is torch.ops.aten.embedding.default or (
        node.target is functional.embedding and node.kwargs.get("max_norm") is None
    )


def _needed_after(
    earlier: fx.Node,
    lookup: fx.Node,
    graph: fx.Graph,
    parameters_of: Callable[[fx.Node], tuple[str, ...]],
) -> list[fx.Node] | None:
    """Lists the nodes that have to move with ``lookup``, in order; None if it has to stay."""
    order = list(graph.nodes)
    position = {node: index for index, node in enumerate(order)}
    between = order[position[earlier] + 1 : position[lookup]]
    needed = {lookup}
    for node in reversed(between):
        if not any(user in needed for user in node.users):
            continue
        if node.op != "get_attr" and (parameters_of(node) or not _only_indexes(node)):
            return None
        needed.add(node)
    sources = needed.union(*(node.all_input_nodes for node in needed))
    if any(_may_write(node) and not sources.isdisjoint(node.all_input_nodes) for node in between):
        return None
    return [node for node in [*between, lookup] if node in needed]


def _only_indexes(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        tags = node.target.tags
        return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags
    if node.op == "call_method":
        return node.target in _INDEX_METHODS
    return node.op == "call_function" and node.target in _INDEX_FUNCTIONS


def _may_write(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or name.startswith("i") or name in ("setitem", "__setitem__")
