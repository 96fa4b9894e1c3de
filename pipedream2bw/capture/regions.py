"""What an exported graph says in several nodes, and a stage has to do at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

_STEPS = {
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
    "_grad_increment_nesting": 1,
    "_grad_decrement_nesting": -1,
    "_saved_tensors_hooks_disable": 1,
    "_saved_tensors_hooks_enable": -1,
}
"""What begins and what ends a transform."""


class TransformError(Exception):
    """A stage would begin between the nodes of a transform."""


def drop_second_writes(graph: fx.Graph) -> None:
    """Removes writes of a buffer to itself.

    Of ``self.steps += 1`` torch.export makes a write in place and, as the attribute was assigned,
    another one at the graph's end.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        buffer, value = node.args[:2]
        while _is_write(value):
            value = value.args[0]
        if not node.users and buffer.op == value.op == "get_attr" and buffer.target == value.target:
            graph.erase_node(node)


def _is_write(node: Any) -> bool:
    """Whether an operator writes to its first argument, which it returns."""
    operation = getattr(node, "target", None)
    return (
        isinstance(operation, torch._ops.OpOverload)
        and operation._schema.is_mutable
        and operation._schema.name.endswith("_")
    )


def fold_transforms(module: fx.GraphModule) -> None:
    """Makes one node of each call of ``torch.vmap`` or ``torch.func.grad``.

    Values inside are no tensors outside.

    Raises:
        TransformError: there is another transform of torch.func.
    """
    inside: list[fx.Node] = []
    depth = 0
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if name == "lazy_load_decompositions":  # of vmap
            node.target()
            module.graph.erase_node(node)
        elif node.op.startswith("call_"):
            step = _STEPS.get(name, 0)
            depth += step
            if step or depth:
                inside.append(node)
            elif "functorch" in str(getattr(node.target, "__module__", "")):
                raise TransformError(
                    f"torch.func ({name}) is called beside layers: call it in a module of its own"
                )
            if step and not depth:
                _fold(module, inside)
                inside = []


def _fold(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    region, outer = fx.Graph(), module.graph
    copies: dict[fx.Node, fx.Node] = {}
    given: list[fx.Node] = []

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            given.append(node)
            copies[node] = region.placeholder(node.name)
        return copies[node]

    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in nodes:
                copied(argument)
    for node in nodes:
        copies[node] = region.node_copy(node, copied)
    returned = [node for node in nodes if any(user not in nodes for user in node.users)]
    region.output(tuple(copies[node] for node in returned))
    name = f"_region{nodes[0].name}"
    setattr(module, name, fx.GraphModule(module, region))
    with outer.inserting_before(nodes[0]):
        held = outer.get_attr(name)
    with outer.inserting_after(nodes[-1]):
        call = outer.call_function(with_transforms, (held, *given))
    call.meta["nn_module_stack"] = nodes[-1].meta.get("nn_module_stack", {})
    with outer.inserting_after(call):
        for index, node in enumerate(returned):
            item = outer.call_function(operator.getitem, (call, index))
            item.meta = node.meta
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(nodes):
        outer.erase_node(node)


def with_transforms(region: Any, *args: Any) -> Any:
    """Runs a region that begins and ends transforms of functions; they end, too, if it fails."""
    transforms, hooks = torch._C._functorch, cast(Any, torch._C._autograd)
    depth = transforms.get_dynamic_layer_stack_depth()
    saves_by_hooks = hooks._saved_tensors_hooks_is_enabled()
    try:
        return region(*args)
    except BaseException:
        transforms.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if saves_by_hooks:
            hooks._saved_tensors_hooks_enable()
        raise
