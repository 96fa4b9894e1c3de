"""What layers are called: in messages, and where ``split=`` and plans name them."""

from __future__ import annotations

from torch import fx

from .captured import Captured


def first_layers(captured: Captured) -> dict[str, int]:
    """Finds the first layer under every name that a stage may begin at (modules and layers)."""
    first: dict[str, int] = {}
    for index, (layer, node) in enumerate(zip(captured.layers, captured.layer_nodes, strict=True)):
        for name in (*modules_around(node), layer.name):
            first.setdefault(name, index)
        if first[layer.name] != index:  # the module's second call
            first.setdefault(node.name, index)
    return first


def describe_layer(captured: Captured, index: int) -> str:
    """Describes a layer for a message: its name and the module that it is in."""
    name = captured.layers[index].name
    around = modules_around(captured.layer_nodes[index])
    return f"{name!r} in {around[-1]!r}" if around and around[-1] != name else repr(name)


def place_of(captured: Captured, index: int) -> str:
    """The innermost module that a layer is in, or its own name outside of all."""
    around = modules_around(captured.layer_nodes[index])
    return around[-1] if around else captured.layers[index].name


def block_around(captured: Captured, index: int) -> str | None:
    """The outermost member of a list or sequence of modules that a layer is in."""
    for name in modules_around(captured.layer_nodes[index]):
        if name.rpartition(".")[2].isdigit():
            return name
    return None


def modules_around(node: fx.Node) -> list[str]:
    """Returns the qualified names of the modules that a node was traced in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    names = (str(name).removeprefix("L['self']").lstrip(".") for name, _ in stack.values())
    return [name for name in names if name and name != _NO_MODULE]


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What torch.export calls the place of a node that it has made outside of all modules."""


def names_of_layers(captured: Captured) -> list[str]:
    """What ``PipelineModule(split=[...])`` takes for each layer."""
    first = first_layers(captured)
    return [
        layer.name if first[layer.name] == index else node.name
        for index, (layer, node) in enumerate(
            zip(captured.layers, captured.layer_nodes, strict=True)
        )
    ]
