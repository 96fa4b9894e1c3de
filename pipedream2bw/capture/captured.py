"""A captured model: a graph whose computing nodes are layers; what they use, cost and share."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..model.trees import bytes_in
from .arguments import CallSignature
from .attribute import Attribute, nodes_with_attributes
from .chain import call_chained
from .costs import CostCounter, LayerCosts
from .dry_run import Findings, dry_run
from .reorder import gather_lookups
from .shape_rule import ShapeRule
from .traced import Traced


@dataclasses.dataclass(frozen=True)
class Layer:
    """One computing node of the captured graph.

    Costs are nominal seconds for the example's rows, the same on every machine; 0: not counted.
    """

    name: str
    forward_cost: float = 0.0
    backward_cost: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Captured:
    """A captured model.

    Attributes:
        how: the way by which it was captured: "list", "sequential", "fx", "export"
            or "dynamo".
        notes: why the earlier ways were not taken, and which modules are called as a whole.
        layers: the computing nodes in execution order.
        model_inputs: the names of the tensors that the model takes, in the order in which
            ``split_model_args`` gives them.
        device: the device of the model's parameters.
        graph, layer_nodes: the graph, and the node of each layer.
        layer_parameters, layer_buffers: qualified names of what each layer uses.
        parameter_names, buffer_names: qualified names of all that the model has, in its order.
        found: what the dry run found out.
        attribute_of: returns what a get_attr or call_module node of the graph refers to.
        signature: the tensors of the example call.
        input_positions: the position of each of ``model_inputs`` among the signature's tensors.
        shape_rule: which shapes of these tensors the graph is valid for; None: the model's own code
            decides.
    """

    how: str
    notes: tuple[str, ...]
    layers: list[Layer]
    model_inputs: tuple[str, ...]
    device: torch.device
    graph: fx.Graph = dataclasses.field(repr=False)
    layer_nodes: list[fx.Node] = dataclasses.field(repr=False)
    layer_parameters: list[tuple[str, ...]] = dataclasses.field(repr=False)
    layer_buffers: list[tuple[str, ...]] = dataclasses.field(repr=False)
    parameter_names: tuple[str, ...] = dataclasses.field(repr=False)
    buffer_names: tuple[str, ...] = dataclasses.field(repr=False)
    found: Findings = dataclasses.field(repr=False)
    attribute_of: Callable[[fx.Node], Attribute] = dataclasses.field(repr=False)
    signature: CallSignature = dataclasses.field(repr=False)
    input_positions: tuple[int, ...] = dataclasses.field(repr=False)
    shape_rule: ShapeRule | None = dataclasses.field(repr=False)

    @property
    def costs(self) -> LayerCosts:
        """What the layers cost, where that was counted."""
        assert self.found.costs is not None
        return self.found.costs

    @property
    def writes_to_inputs(self) -> bool:
        """Whether a layer writes to what the model is given, or may."""
        if self.found.unknown:
            return True
        storages = [self.found.storages.get(name, frozenset()) for name in self.model_inputs]
        return not frozenset().union(*storages).isdisjoint(frozenset().union(*self.found.writes))


class Draft:
    """A graph of a model, before it is known what its layers cost."""

    def __init__(
        self,
        root: nn.Module,
        how: str,
        traced: Traced,
        signature: CallSignature,
        *,
        notes: Sequence[str] = (),
    ) -> None:
        self.traced = traced
        self._root, self._how, self._signature = root, how, signature
        why_whole = "is kept whole, as torch.fx cannot look inside"
        whole = [f"{name} {why_whole}: {why}" for name, why in traced.leaves.items()]
        self._notes = (*notes, *whole)
        graph = traced.graph
        self._names = _Names(root, _constants(root, graph, traced.module))
        gather_lookups(graph, self._names.module_of, lambda node: self._names.used_by(node)[0])
        self._layers = [node for node in graph.nodes if node.op.startswith("call_")]
        self._uses = [self._names.used_by(node) for node in self._layers]

    @property
    def parameter_bytes(self) -> list[tuple[str, int]]:
        """Each layer's name, and the bytes of its parameters."""
        sizes = {name: bytes_in(parameter) for name, parameter in self._root.named_parameters()}
        return [
            (layer_name(node), sum(sizes[name] for name in parameters))
            for node, (parameters, _) in zip(self._layers, self._uses, strict=True)
        ]

    @functools.cached_property
    def captured(self) -> Captured:
        """The capture, with what its layers cost."""
        return self.dry_run(CostCounter())

    def dry_run(self, counter: CostCounter | None) -> Captured:
        """The capture, with what a run on fake tensors finds out."""
        root, graph, names, uses = self._root, self.traced.graph, self._names, list(self._uses)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        positions = tuple(i for i, node in enumerate(placeholders) if node.users)
        if uses:  # what the model returns as it is belongs to where it is returned
            (output,) = (node for node in graph.nodes if node.op == "output")
            uses[-1] = names.used_by(self._layers[-1], output)
        examples = [leaf.example for leaf in self._signature.tensors]
        tensors = [*root.parameters(), *examples]
        compares = self._how == "fx"  # the other ways run the model's own code
        call = self._signature if compares or self.traced.changes_attributes else None
        found = dry_run(
            root,
            graph,
            names.attribute_of,
            examples,
            counter,
            call=call,
            compares=compares,
            is_chain=self._how in ("list", "sequential"),
        )
        names_of_layers = map(layer_name, self._layers)
        costs = found.costs
        counted = () if costs is None else (costs.forward, costs.backward)
        layers = [Layer(*each) for each in zip(names_of_layers, *counted, strict=True)]
        return Captured(
            how=self._how,
            notes=self._notes,
            layers=layers,
            model_inputs=tuple(placeholders[i].name for i in positions),
            device=tensors[0].device if tensors else torch.device("cpu"),
            graph=graph,
            layer_nodes=self._layers,
            layer_parameters=[parameters for parameters, _ in uses],
            layer_buffers=[buffers for _, buffers in uses],
            parameter_names=tuple(name for name, _ in root.named_parameters()),
            buffer_names=tuple(name for name, _ in root.named_buffers()),
            found=found,
            attribute_of=names.attribute_of,
            signature=self._signature,
            input_positions=positions,
            shape_rule=self.traced.shape_rule,
        )


def _constants(root: nn.Module, graph: fx.Graph, traced: nn.Module) -> dict[str, Any]:
    """Returns what the graph takes from the traced module and is no state of the model, by name."""
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    known.update(name for name, _ in root.named_parameters(remove_duplicate=False))
    known.update(name for name, _ in root.named_buffers(remove_duplicate=False))
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - known
    constants = {target: operator.attrgetter(target)(traced) for target in targets}
    for target, value in constants.items():
        if isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta):
            raise ValueError(
                f"{target}: a tensor of shape {tuple(value.shape)} without values {_AS_A_CONSTANT}"
            )
    addresses = {p.untyped_storage().data_ptr(): name for name, p in root.named_parameters()}
    refuse_parameters(constants.values(), addresses)
    return constants


def refuse_parameters(constants: Iterable[Any], addresses: Mapping[int, str]) -> None:
    """Raises ValueError if a constant is in the memory of a parameter.

    ``addresses`` gives the name of the parameter whose storage begins at an address.
    """
    for value in constants:
        if isinstance(value, torch.Tensor) and value.numel():
            name = addresses.get(value.untyped_storage().data_ptr())
            if name is not None:
                raise ValueError(f"parameter {name} {_AS_A_CONSTANT}")


_AS_A_CONSTANT = (
    "would be a constant: the forward refers to it in another way than as an attribute of its "
    "module (a closure, or an object or nested container that holds it)"
)


def constants_of(captured: Captured) -> list[Any]:
    """Returns the constants that the graph refers to."""
    nodes = (node for node in captured.graph.nodes if node.op == "get_attr")
    attributes = map(captured.attribute_of, nodes)
    return [attribute.value for attribute in attributes if attribute.kind == "constant"]


def layer_name(node: fx.Node) -> str:
    """Names a layer for messages and ``split=``: by its module if it has one, else by its node."""
    if node.op == "call_module":
        return str(node.target)
    if node.target is call_chained:
        return str(node.args[0].target)  # type: ignore[union-attr]
    return node.name


class _Names:
    """Looks up the names in a graph: parameters and buffers under their canonical names."""

    def __init__(self, root: nn.Module, constants: Mapping[str, Any]) -> None:
        self._root = root
        self._constants = constants
        self._parameters = {id(item): name for name, item in root.named_parameters()}
        self._buffers = {id(item): name for name, item in root.named_buffers()}
        self._modules = dict(root.named_modules(remove_duplicate=False))

    def attribute_of(self, node: fx.Node) -> Attribute:
        """Returns what a get_attr or call_module node refers to."""
        target = str(node.target)
        if target in self._constants:
            return Attribute("constant", target, self._constants[target])
        if target in self._modules:
            return Attribute("module", target)
        owner, _, name = target.rpartition(".")
        module = self._modules[owner]
        if name in module._parameters:
            return Attribute("parameter", target)
        assert name in module._buffers, target
        return Attribute("buffer", target)

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """Returns the module that a call_module node calls, if it is one of the model's."""
        return self._modules.get(str(node.target)) if node.op == "call_module" else None

    def used_by(self, *layers: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the canonical names of the parameters and of the buffers that layers use."""
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        nodes = (node for layer in layers for node in nodes_with_attributes(layer))
        for attribute in map(self.attribute_of, nodes):
            item = attribute.found_in(self._root)
            if attribute.kind == "module":
                parameters.extend(item.parameters())
                buffers.extend(item.buffers())
            elif attribute.kind == "parameter":
                parameters.append(item)
            elif attribute.kind == "buffer":
                buffers.append(item)
        return (
            tuple(dict.fromkeys(self._parameters[id(item)] for item in parameters)),
            tuple(dict.fromkeys(self._buffers[id(item)] for item in buffers)),
        )


def first_layers(captured: Captured) -> dict[str, int]:
    """Finds the first layer under every name that a stage may begin at (modules and layers)."""
    first: dict[str, int] = {}
    for index, (layer, node) in enumerate(zip(captured.layers, captured.layer_nodes, strict=True)):
        for name in (*modules_around(node), layer.name):
            first.setdefault(name, index)
        if first[layer.name] != index:  # the module's second call
            first.setdefault(node.name, index)
    return first


def place_of(captured: Captured, index: int) -> str:
    """The innermost module that a layer is in, or its own name outside of all."""
    around = modules_around(captured.layer_nodes[index])
    return around[-1] if around else captured.layers[index].name


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
