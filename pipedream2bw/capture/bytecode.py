"""Capturing by Dynamo, torch.compile's reader of Python's bytecode.

It is the last way: it takes what torch.fx cannot trace and torch.export would change, as custom
autograd functions and hooks of tensors, whose backward it records. One graph has to be enough
(``fullgraph``), and nothing but its outputs may remain of the forward.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..model.clone import copies_of_buffers, structural_clone
from ..model.hooks import refuse_hooks
from ..model.sources import sources_kept
from ..model.surroundings import torch_reports_silenced
from ..model.trees import hides_tensors, opened
from .arguments import CallSignature
from .exporting import SpecializedError, example_of
from .regions import fold_transforms
from .shape_rule import ShapeRule
from .traced import Traced


class LeftOutError(Exception):
    """The graph would not do all that the forward does."""


@dataclasses.dataclass
class _Recording:
    """A graph, and what stands for its outputs in what the model returns."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    outputs: list[torch.Tensor]


def read_bytecode(
    root: nn.Module, signature: CallSignature, replicated: set[str], *, dynamic_shapes: bool
) -> Traced:
    """Captures ``root`` as the example call calls it; the forward is not computed.

    Args:
        dynamic_shapes: whether sizes beside the number of rows are left open where the model does.

    Raises:
        Exception: whatever torch.compile raises where one graph is not enough.
        HookedError: a module has hooks.
        SpecializedError: the number of rows was fixed.
        LeftOutError: a mode is switched between layers, or a buffer is assigned.
    """
    refuse_hooks(root)
    clone = structural_clone(root, {}, copies_of_buffers(root), on_trial=True)
    examples = [example_of(leaf, replicated) for leaf in signature.tensors]
    for leaf, example in zip(signature.tensors, examples, strict=True):
        for dimension in range(example.dim()):
            if dimension == 0 and leaf.carries_batch(replicated):
                torch._dynamo.mark_dynamic(example, 0)
            elif dynamic_shapes:
                torch._dynamo.maybe_mark_dynamic(example, dimension)
            else:
                torch._dynamo.mark_static(example, dimension)
    recording, result = _recorded(clone, signature, examples)
    return _Graph(clone, recording, signature, examples).made(result, replicated)


def _recorded(
    clone: nn.Module, signature: CallSignature, examples: Sequence[torch.Tensor]
) -> tuple[_Recording, Any]:
    """The graph, and what the model returned, in which tensors stand for the graph's outputs."""
    found: list[_Recording] = []

    def record(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        found.append(_Recording(module, list(inputs), [torch.empty(0) for _ in output.args[0]]))
        return lambda *args: found[0].outputs

    args, kwargs = signature.rebuild(examples)
    buffers = dict(clone.named_buffers())
    compiled = torch.compile(clone, backend=record, fullgraph=True)
    # Every capture is another graph of the same code, of which torch.compile limits the number.
    limits = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}
    patched = torch._dynamo.config.patch(limits)
    with sources_kept(clone) as sources, torch_reports_silenced(), patched:
        before = sources.now()
        result = compiled(*args, **kwargs)
        sources.refuse_taken(before)
    if len(found) != 1:
        raise LeftOutError("the forward computes nothing")
    for name, buffer in clone.named_buffers():
        if buffers.get(name) is not buffer:
            raise LeftOutError(f"the forward assigns another tensor to the buffer {name}")
    return found[0], result


class _Graph:
    """Makes a capture's graph of the one that Dynamo gives, whose weights are arguments."""

    def __init__(
        self,
        clone: nn.Module,
        recording: _Recording,
        signature: CallSignature,
        examples: Sequence[torch.Tensor],
    ) -> None:
        fold_transforms(recording.module)
        self._recording = recording
        self._module = recording.module  # what the graph refers to beside the model's tensors
        self._signature = signature
        self._examples = examples
        state = (*clone.named_parameters(), *clone.named_buffers())
        self._state = {id(tensor): name for name, tensor in state}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[Any, tuple[fx.Node, int]] = {}  # the open ones: argument and dimension

    def made(self, result: Any, replicated: set[str]) -> Traced:
        graph, source = self._graph, self._module.graph
        inputs = [graph.placeholder(leaf.name) for leaf in self._signature.tensors]
        placeholders = [node for node in source.nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, self._recording.inputs, strict=True))
        values = self._values(given, replicated)
        for node, value in zip(inputs, values, strict=True):
            node.meta["val"] = value
            shape: Sequence[Any] = value.shape
            for dimension, size in enumerate(shape):
                if isinstance(size, torch.SymInt):
                    self._sizes[size.node.expr] = node, dimension
        for node, value in given.items():
            self._copies[node] = self._argument(node, value, inputs)
        switch = next(filter(changes_modes, source.nodes), None)
        if switch is not None:
            raise LeftOutError(f"{switch.name} switches a mode of torch between layers")
        returned = graph.graph_copy(source, self._copies)
        for node, copied in self._copies.items():
            if node not in given:
                _complete(node, copied)
        self._return(result, inputs, returned)
        for node in reversed(list(graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target == "size"):
                graph.erase_node(node)
        graph.lint()
        return Traced(graph=graph, module=self._module, shape_rule=ShapeRule(values))

    def _values(self, given: Mapping[fx.Node, Any], replicated: set[str]) -> list[torch.Tensor]:
        """What stands for the call's tensors, whose numbers of rows are open."""
        fake = {id(value): node.meta.get("example_value") for node, value in given.items()}
        values = []
        for leaf, example in zip(self._signature.tensors, self._examples, strict=True):
            value: Any = fake.get(id(example))
            if value is None:  # the forward does not use it
                value = example
            elif leaf.carries_batch(replicated) and not isinstance(value.shape[0], torch.SymInt):
                raise SpecializedError(f"the rows of {leaf.path} were fixed to {value.shape[0]}")
            values.append(value)
        return values

    def _argument(self, node: fx.Node, value: Any, inputs: Sequence[fx.Node]) -> fx.Node:
        for position, example in enumerate(self._examples):
            if value is example:
                return inputs[position]
        if id(value) in self._state:
            return self._graph.get_attr(self._state[id(value)])
        if isinstance(value, (int, torch.SymInt)):
            return self._size(node)
        if isinstance(value, torch.Tensor):  # which the forward finds elsewhere
            name = f"_constant_{len(self._copies)}"
            self._module.register_buffer(name, value)
            return self._graph.get_attr(name)
        raise LeftOutError(f"{node.target} is neither an argument nor a tensor of the model")

    def _size(self, node: fx.Node) -> fx.Node:
        """A node for the open size that the graph takes as an argument."""
        size: Any = node.meta.get("example_value")
        place = self._sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if place is None:
            raise LeftOutError(f"{node.target} is a number that is no size of an argument")
        made = self._graph.call_method("size", place)
        made.meta["val"] = size
        return made

    def _return(self, result: Any, inputs: Sequence[fx.Node], outputs: Any) -> None:
        stand_ins = zip(self._recording.outputs, outputs, strict=True)
        known: dict[int, Any] = {id(stand_in): node for stand_in, node in stand_ins}
        known |= {id(example): node for example, node in zip(self._examples, inputs, strict=True)}
        leaves, spec = pytree.tree_flatten(opened(result))
        returned = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._state:
                returned.append(self._graph.get_attr(self._state[id(leaf)]))
            elif isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                raise LeftOutError("the model returns a tensor that its graph does not make")
            elif hides_tensors(leaf):
                raise LeftOutError(f"the model returns a {type(leaf).__name__} with tensors in it")
            else:
                returned.append(known.get(id(leaf), leaf))
        self._graph.output(tuple(returned)).meta["out_spec"] = spec


def _complete(node: fx.Node, copied: fx.Node) -> None:
    """Gives the copy of a node of Dynamo's what the node has besides its arguments."""
    if getattr(node.target, "__name__", "") == "register_hook":
        copied.target = with_hook
    if "example_value" in node.meta:
        copied.meta["val"] = node.meta["example_value"]
    stack = node.meta.get("nn_module_stack") or {}
    copied.meta["nn_module_stack"] = {
        key: (_qualified(str(name)), kind) for key, (name, kind) in stack.items()
    }


def with_hook(tensor: torch.Tensor, body: Any, *args: Any) -> torch.Tensor:
    """Registers a hook that Dynamo has recorded, unless nothing is differentiated.

    The capture is made with gradients; evaluation runs the same graph without.
    """
    if not tensor.requires_grad:
        return tensor
    tensor.register_hook(lambda gradient: body(gradient, *args))  # type: ignore[no-untyped-call]
    return tensor


def changes_modes(node: fx.Node) -> bool:
    """Whether a node of Dynamo's switches gradients, autocast or inference mode on or off."""
    name = getattr(node.target, "__name__", str(node.target))
    return name in _SWITCHES


_SWITCHES = {
    "_set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "_enter_inference_mode",
    "_exit_inference_mode",
}


def _qualified(name: str) -> str:
    """The name of a module as the model knows it: of ``L['self']._modules['blocks'][0]`` it is
    ``blocks.0``."""
    plain = re.sub(r"\['?([^'\]]+)'?\]", r".\1", name)
    return ".".join(part for part in plain.split(".")[2:] if part not in ("_modules", "__dict__"))
