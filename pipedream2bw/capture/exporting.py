"""Capturing by torch.export, for models whose own forward cannot be traced by torch.fx.

The number of rows (dimension 0 of every tensor that carries the batch) stays symbolic. Microbatches
and evaluation batches have other numbers of rows than the example. Other sizes are the example's,
or, at up to three times the cost, whatever the model leaves open.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from ..model.added_loss import restore_added_losses
from ..model.hooks import refuse_hooks
from ..model.sources import sources_kept
from ..model.surroundings import attribute_set, torch_reports_silenced
from ..model.trees import tensors_in
from .arguments import CallSignature
from .own_program import note_changes
from .regions import drop_second_writes, fold_transforms
from .shape_rule import ShapeRule
from .templates import TensorLeaf
from .traced import Traced


class BackwardLostError(Exception):
    """The exported program would not run a backward that the forward asks for."""


class SpecializedError(Exception):
    """The exported program is only valid for some numbers of rows."""


def export(
    root: nn.Module, signature: CallSignature, replicated: set[str], *, dynamic_shapes: bool
) -> Traced:
    """Exports ``root``, a structural clone that nobody else uses, as the example call calls it.

    Args:
        dynamic_shapes: whether sizes beside the number of rows are left open where the model does.

    Raises:
        Exception: whatever torch.export raises, or HookedError.
        SpecializedError: the number of rows was fixed.
        BackwardLostError: the forward calls a custom autograd function, or registers a hook.
    """
    examples = [example_of(leaf, replicated) for leaf in signature.tensors]
    args, kwargs = signature.rebuild(examples)
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf, example in zip(signature.tensors, examples, strict=True):
        others = torch.export.Dim.AUTO if dynamic_shapes else torch.export.Dim.STATIC
        dimensions: dict[int, Any] = dict.fromkeys(range(example.dim()), others)
        if leaf.carries_batch(replicated):
            dimensions[0] = torch.export.Dim.DYNAMIC
        shapes[example] = dimensions
    refuse_hooks(root)
    has_changed = note_changes(root)
    _name_keywords(root, args, kwargs)
    importlib.import_module("torch.export._trace")  # whose prints are silenced
    with (
        sources_kept(root) as sources,
        torch_reports_silenced(),
        _backwards_kept(),
        _no_origins_noted(),
    ):
        before = sources.now()
        dynamic = shapes.dynamic_shapes(root, args, kwargs)  # type: ignore[no-untyped-call]
        program = torch.export.export(root, args, kwargs, dynamic_shapes=dynamic, strict=False)
        sources.refuse_taken(before)
    module = program.module(check_guards=False)
    graph = module.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.meta["out_spec"] = program.call_spec.out_spec
    values = _tensor_inputs(graph, signature)
    for leaf, value in zip(signature.tensors, values, strict=True):
        if leaf.carries_batch(replicated):
            _check_rows(leaf.path, value.shape[0], program.range_constraints)
    drop_second_writes(graph)
    _drop_checks(graph)
    for node in graph.nodes:  # regions are called directly, under context managers
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in _REGIONS:
            node.target = _REGIONS[name]
    for part in list(module.modules()):
        if isinstance(part, fx.GraphModule):
            restore_added_losses(part)
            fold_transforms(part)
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    return Traced(
        graph=graph, module=module, shape_rule=ShapeRule(values), changes_attributes=has_changed()
    )


def _no_origins_noted() -> contextlib.AbstractContextManager[None]:
    """Spares an export a tenth of its time: torch notes the lines that call each operator."""
    name = "do_not_emit_stack_traces"
    config = getattr(fx, "config", None)  # older torch has neither
    return attribute_set(config, name, True) if hasattr(config, name) else contextlib.nullcontext()


@contextlib.contextmanager
def _backwards_kept() -> Iterator[None]:
    """Refuses what torch.export leaves out: it keeps a forward's operators alone.

    Their own derivatives would take the place of a custom autograd function's backward. Hooks of
    tensors and of saved tensors would not be called. Functions and checkpoints of torch itself may
    stay: their backwards are those of the operators.
    """
    function, tensor, saved = torch.autograd.Function, torch.Tensor, saved_tensors_hooks
    apply, hook, enter = function.__dict__["apply"], tensor.register_hook, saved.__enter__
    this_thread = threading.get_ident()  # others, with pipelines at work, go on as they are

    def refusing_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if (
            any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
            and torch.is_grad_enabled()
            and threading.get_ident() == this_thread
            and not cls.__module__.startswith(("torch.", "pipedream2bw."))
        ):
            raise BackwardLostError(
                f"the backward of the autograd function {cls.__qualname__} would be lost"
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    def refusing_hook(self: torch.Tensor, called: Any) -> Any:
        if threading.get_ident() != this_thread:
            return hook(self, called)  # type: ignore[no-untyped-call]
        raise BackwardLostError(f"a hook of a tensor would be lost: {called}")

    def refusing_enter(self: saved_tensors_hooks) -> None:
        kind = type(self)
        if threading.get_ident() != this_thread or kind.__module__ == "torch.utils.checkpoint":
            return enter(self)
        raise BackwardLostError(f"hooks of saved tensors would be lost: {kind.__qualname__}")

    with (
        attribute_set(function, "apply", classmethod(refusing_apply)),
        attribute_set(tensor, "register_hook", refusing_hook),
        attribute_set(saved, "__enter__", refusing_enter),
    ):
        yield


def _name_keywords(root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Gives a forward with ``**kwargs`` a signature that names those of the call.

    torch.export (2.13) counts them twice where shapes are given: as itself, and in ``kwargs``.
    """
    signature = inspect.signature(root.forward)
    rest = [p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD]
    bound = signature.bind(*args, **kwargs).arguments
    if not rest or rest[0] not in bound:
        return
    forward = root.forward

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = [p for p in signature.parameters.values() if p.name != rest[0]]
    own += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in bound[rest[0]]]
    named.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    root.forward = named


def example_of(leaf: TensorLeaf, replicated: set[str]) -> torch.Tensor:
    """A copy of an argument's example with a number of rows that may stay open."""
    example = leaf.example.detach()
    # torch.export takes a dimension of size 0 or 1 for a constant.
    if leaf.carries_batch(replicated) and example.shape[0] == 1:
        example = example.expand(2, *example.shape[1:])
    # A copy, since torch.export may treat one tensor given twice as aliases.
    return example.clone()


def _tensor_inputs(graph: fx.Graph, signature: CallSignature) -> list[torch.Tensor]:
    """What stands for the call's tensors; removes the placeholders of all other arguments."""
    values = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            values.append(value)
        else:
            assert not node.users, f"the constant argument {node.name} is used as a value"
            graph.erase_node(node)
    expected = [leaf.example.dim() for leaf in signature.tensors]
    found = [value.dim() for value in values]
    if found != expected:
        raise SpecializedError(
            f"tensor arguments of {found} dimensions in the exported program, of {expected} in the "
            "example call"
        )
    return values


def _check_rows(path: str, rows: Any, constraints: Mapping[Any, Any]) -> None:
    if not isinstance(rows, torch.SymInt):
        raise SpecializedError(f"the rows of {path} were fixed to {rows}")
    symbol = rows.node.expr
    if not symbol.is_Symbol:
        raise SpecializedError(f"the rows of {path} have to be of the form {symbol}")
    limits = constraints.get(symbol)
    if limits is not None and (limits.lower > 2 or limits.upper < 2**31):
        raise SpecializedError(
            f"the rows of {path} have to be between {limits.lower} and {limits.upper}"
        )


def _drop_checks(graph: fx.Graph) -> None:
    """Removes run-time checks of what the example call fixed, and the nodes that only they use."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "call_module", "get_attr"):
            continue
        if node.op == "get_attr" or _is_check(node) or _is_pure(node):
            graph.erase_node(node)


def _is_check(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name.startswith(("_assert_", "_guards", "sym_constrain_range", "_check"))


def _is_pure(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        schema, tags = node.target._schema, node.target.tags
        # Batch norms write their statistics, but their schemas do not say so.
        if any(argument.name == "running_mean" for argument in schema.arguments):
            return False
        return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags
    return getattr(node.target, "__module__", "") in ("_operator", "math")


def with_grad_enabled(enabled: bool, region: Any, *args: Any) -> Any:
    """Runs a region of an exported program with gradient recording on or off."""
    with torch.set_grad_enabled(enabled):
        return region(*args)


def with_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    region: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a region of an exported program under autocast."""
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return region(*args, **kwargs)


_REGIONS = {
    "wrap_with_set_grad_enabled": with_grad_enabled,
    "wrap_with_autocast": with_autocast,
}
