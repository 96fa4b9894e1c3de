"""Graphs of a captured model with its loss, one for each number of rows of a microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...capture.captured import Captured, Layer
from ...capture.costs import dry_run
from ...capture.device_figures import DeviceFigures
from ...model.metrics import check_loss


@dataclasses.dataclass(frozen=True)
class LossGraph:
    """A captured model with its loss as the last layer, for microbatches of some number of rows.

    Attributes:
        rows: rows of a microbatch.
        captured: the model's capture with one layer more, the loss; costs are for these rows.
        inputs: a microbatch's inputs of the graph, by name.
    """

    rows: int
    captured: Captured
    inputs: dict[str, torch.Tensor]


def add_loss(
    captured: Captured,
    root: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    target: Any,
    *,
    rows: int,
    replicated: Sequence[str],
    figures: DeviceFigures,
) -> LossGraph:
    """Adds ``loss_fn(output, target)`` to a capture and finds its costs for a number of rows.

    Tensors of the example call and of ``target`` are cut or repeated along dimension 0.
    """
    leaves, structure = pytree.tree_flatten(target)
    is_input = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(captured.graph, copies)
    (old_output,) = (node for node in captured.graph.nodes if node.op == "output")
    spec = old_output.meta.get("out_spec")
    targets = [graph.placeholder("target") for given in is_input if given]

    def loss_of(output: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors = iter(given)
        target = pytree.tree_unflatten(
            [next(tensors) if i else leaf for leaf, i in zip(leaves, is_input, strict=True)],
            structure,
        )
        value = output if spec is None else pytree.tree_unflatten(list(output), spec)
        return check_loss(loss_fn(value, target))

    loss = graph.call_function(loss_of, (output, targets))
    graph.output(loss)
    whole = set(replicated)
    examples = [
        of_rows(leaf.example, rows) if leaf.carries_batch(whole) else leaf.example.detach()
        for leaf in captured.signature.tensors
    ]
    given = [of_rows(leaf, rows) for leaf, i in zip(leaves, is_input, strict=True) if i]
    tensors = [*examples, *given]
    costs = dry_run(root, graph, captured.attribute_of, tensors, figures, count_saved=True)
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, tensors, strict=True))
    made = dataclasses.replace(
        captured,
        layers=[*captured.layers, Layer("loss", costs.forward[-1], costs.backward[-1])],
        model_inputs=(*captured.model_inputs, *(node.name for node in targets)),
        graph=graph,
        layer_nodes=[*(copies[node] for node in captured.layer_nodes), loss],
        layer_parameters=[*captured.layer_parameters, ()],
        layer_buffers=[*captured.layer_buffers, ()],
        costs=costs,
    )
    return LossGraph(rows, made, {name: values[name] for name in made.model_inputs})


def of_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A new tensor with so many of the tensor's rows, which are repeated if there are fewer."""
    index = torch.arange(rows, device=tensor.device) % tensor.shape[0]
    return tensor.detach()[index]
