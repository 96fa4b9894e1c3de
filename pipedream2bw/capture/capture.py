"""From a user's model to a graph of layers that can be cut into stages.

Four ways, tried in this order: lists of modules and nn.Sequential are taken as they are. Anything
else is traced by torch.fx. What fx cannot trace is traced by torch.export, and what that would
change by Dynamo. All give one graph whose computing nodes are the layers, so cutting, costs and
code generation know only one form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..model.surroundings import plain_modes
from ..progress import progress
from .arguments import CallSignature
from .captured import Captured, Draft
from .chain import ModuleChain, as_root, call_chained
from .search import Search, explained
from .traced import Traced

_MANY_STAGES = 8
"""A model that torch.fx cannot trace as a whole is exported unless it can form so many."""


def capture(
    model: nn.Module | Sequence[nn.Module],
    *,
    num_stages: int,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split: str | Sequence[str] = "auto",
    replicated: Sequence[str] = (),
    dynamic_shapes: bool = False,
    prefer: str | None = None,
    why_not: Callable[[Captured], str | None] | None = None,
    balances: bool = False,
) -> Captured:
    """Captures ``model`` as it behaves now (each module in its current train or eval mode).

    The model, its buffers and the random state stay as they are; the model must not run in another
    thread meanwhile. It must be one that :func:`refuse_untrainable` does not refuse.

    Args:
        model: the module, or a list of modules to be chained (see :func:`as_root`).
        num_stages: how many stages the capture must allow.
        example_args, example_kwargs: structure, dtypes and trailing shapes of a call; the tensors
            may have any number of rows >= 1 in dimension 0.
        split: "auto", or the qualified names where the later stages begin.
        replicated: names of arguments whose dimension 0 is no batch dimension.
        dynamic_shapes: whether torch.export leaves all sizes open that the model leaves open.
        prefer: the way by which the model's other mode was captured, tried first: "fx" skips
            nn.Sequential's children as layers, "export" and "dynamo" are tried before "fx".
        why_not: a further demand: gives the reason why a capture does not serve, None if it does.
        balances: costs are wanted to balance the stages alone: they are not counted where the
            layers can form them in one way.

    Raises:
        ValueError: the model refuses the example arguments, or no way of capture works (the message
            gives each one's reason).
        TypeError: ``model`` is neither a module nor a list of modules.
    """
    root = as_root(model)
    first = root[0] if isinstance(root, ModuleChain) else root
    signature = CallSignature(first.forward, tuple(example_args), dict(example_kwargs or {}))
    _check_rows(signature, set(replicated))
    names = () if isinstance(split, str) else tuple(split)
    reasons: list[str] = []
    with plain_modes():
        how = "list" if isinstance(root, ModuleChain) else None
        if isinstance(root, nn.Sequential) and prefer in (None, "sequential"):
            reason = _why_not_sequential(root, signature, num_stages, names)
            how = "sequential" if reason is None else None
            reasons += [] if reason is None else [f"sequential: {reason}"]
        if how is not None:
            draft = Draft(root, how, chained(root, signature), signature)
            is_given = balances and len(draft.parameter_bytes) == num_stages
            captured = draft.dry_run(None) if is_given else draft.captured
        else:
            search = Search(
                root=root,
                signature=signature,
                num_stages=num_stages,
                names=names,
                replicated=set(replicated),
                dynamic_shapes=dynamic_shapes,
                demand=why_not or (lambda captured: None),
                reasons=reasons,
            )
            with progress(f"capture of {type(root).__name__}") as begin:
                captured = search.capture(prefer, begin)
        if captured.found.unfit is not None:
            raise ValueError(f"the model ({type(root).__name__}): {captured.found.unfit}")
        error = captured.found.error
        return captured if error is None else explained(root, captured, error)


def capture_finely(
    root: nn.Module,
    example: tuple[Sequence[Any], Mapping[str, Any]],
    replicated: Sequence[str],
    *,
    dynamic_shapes: bool = False,
) -> Captured:
    """Captures a model in as many layers as possible: ``split=`` may name any of them.

    Profiles and plans count these layers, so they do not depend on a number of stages.
    """
    args, kwargs = example
    options: dict[str, Any] = {
        "example_args": args,
        "example_kwargs": kwargs,
        "replicated": replicated,
        "dynamic_shapes": dynamic_shapes,
        "prefer": "fx",
    }
    try:
        return capture(root, num_stages=_MANY_STAGES, **options)
    except ValueError:
        return capture(root, num_stages=1, **options)


def split_model_args(
    captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Returns the values of ``captured.model_inputs`` in a call, in that order.

    Raises:
        ValueError, TypeError: the call differs from the example call in more than its tensors (see
            :meth:`CallSignature.tensors_of`).
    """
    values = captured.signature.tensors_of(args, kwargs)
    return [values[position] for position in captured.input_positions]


def _check_rows(signature: CallSignature, replicated: set[str]) -> None:
    first: tuple[str, int] | None = None
    for leaf in signature.tensors:
        if not leaf.carries_batch(replicated):
            continue
        if leaf.example.dim() == 0 or leaf.example.shape[0] == 0:
            raise ValueError(
                f"example argument {leaf.path} has shape {tuple(leaf.example.shape)}: dimension 0 "
                "holds the batch's rows, at least 1. Name an argument without rows in replicated="
            )
        rows = leaf.example.shape[0]
        first = first or (leaf.path, rows)
        if rows != first[1]:
            raise ValueError(
                f"example argument {leaf.path} has {rows} rows, {first[0]} has {first[1]}: every "
                "tensor is split into microbatches along dimension 0. Name a tensor in replicated= "
                "to pass it whole"
            )


def _why_not_sequential(
    root: nn.Sequential, signature: CallSignature, num_stages: int, names: Sequence[str]
) -> str | None:
    if type(root).forward is not nn.Sequential.forward or "forward" in root.__dict__:
        return "its forward is not nn.Sequential's"
    if len(root) < num_stages:
        return f"{len(root)} children, num_stages: {num_stages}"
    if len(signature.args) + len(signature.kwargs) != 1:
        raise ValueError(
            f"example_args and example_kwargs give {len(signature.args) + len(signature.kwargs)} "
            "arguments: nn.Sequential takes 1"
        )
    inner = [name for name in names if name not in root._modules]
    if inner:
        return f"split names {inner[0]!r}, which is not one of its children"
    return None


def chained(root: nn.Module, signature: CallSignature) -> Traced:
    """Makes the graph of modules that are called one after another, with one node for each."""
    graph = fx.Graph()
    inputs = [graph.placeholder(leaf.name) for leaf in signature.tensors]
    args, kwargs = signature.rebuild(inputs)
    first, *rest = root._modules
    value = graph.call_module(first, args, kwargs)
    for name in rest:
        if isinstance(root, ModuleChain):
            value = graph.call_function(call_chained, (graph.get_attr(name), value))
        else:
            value = graph.call_module(name, (value,))
    graph.output(value)
    return Traced(graph=graph, module=root)
