"""From a user's model to a graph of layers that can be cut into stages.

Three ways, tried in this order: lists of modules and nn.Sequential are taken as they are, anything
else is traced by torch.fx, and what fx cannot trace by torch.export. All three give one graph
whose computing nodes are the layers, so cutting, costs and code generation know only one form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..model.clone import copies_of_buffers, structural_clone
from ..model.surroundings import plain_modes, random_state_kept
from .arguments import CallLayout
from .captured import Captured, build_captured, first_layers
from .chain import ModuleChain, as_root, chain_graph, is_plain_sequential, sequential_graph
from .exporting import carries_batch, export
from .tracing import reason_of, trace


def capture(
    model: nn.Module | Sequence[nn.Module],
    *,
    num_stages: int,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split: str | Sequence[str] = "auto",
    replicated: Sequence[str] = (),
    prefer: str | None = None,
    why_not: Callable[[Captured], str | None] | None = None,
) -> Captured:
    """Captures ``model`` as it behaves now (each module in its current train or eval mode).

    The model, its buffers and the random state are left as they were; the model must not run in
    another thread meanwhile.

    Args:
        model: the module, or a list of modules to be chained (see :func:`as_root`).
        num_stages: how many stages the capture must allow.
        example_args, example_kwargs: structure, dtypes and trailing shapes of a call; the tensors
            may have any number of rows >= 1 in dimension 0.
        split: "auto", or the qualified names where the later stages begin.
        replicated: names of arguments whose dimension 0 is no batch dimension.
        prefer: the way by which the model's other mode was captured, tried first: "fx" skips
            nn.Sequential's children as layers, "export" is tried before "fx".
        why_not: a further demand: tells why a capture will not do, None if it will. Without another
            way that will, capturing fails.

    Raises:
        ValueError: parameters that a pipeline cannot hold, example arguments that the model
            refuses, or no way of capture works (the message gives each one's reason).
        TypeError: something else than a module or a list of modules, or a module that cannot be
            cloned.
    """
    root = as_root(model)
    first = root.children_in_order()[0] if isinstance(root, ModuleChain) else root
    layout = CallLayout(first.forward, tuple(example_args), dict(example_kwargs or {}))
    _check_rows(layout, set(replicated))
    names = () if isinstance(split, str) else tuple(split)
    with plain_modes():
        search = _Search(root, layout, num_stages, names, set(replicated), why_not)
        return _checked(root, search.run(prefer))


class _Search:
    """Tries the ways of capture until one serves; collects why the others do not."""

    def __init__(
        self,
        root: nn.Module,
        layout: CallLayout,
        num_stages: int,
        names: tuple[str, ...],
        replicated: set[str],
        why_not: Callable[[Captured], str | None] | None,
    ) -> None:
        self._demand = why_not or (lambda captured: None)
        self._root = root
        self._layout = layout
        self._num_stages = num_stages
        self._names = names
        self._replicated = replicated
        self._reasons: list[str] = []

    def run(self, prefer: str | None) -> Captured:
        root, layout = self._root, self._layout
        if isinstance(root, ModuleChain):
            return build_captured(root, "list", chain_graph(root, layout), layout, ())
        if isinstance(root, nn.Sequential) and prefer in (None, "sequential"):
            reason = _why_not_sequential(root, layout, self._num_stages, self._names)
            if reason is None:
                graph = sequential_graph(root, layout)
                return build_captured(root, "sequential", graph, layout, ())
            self._reasons.append(f"sequential: {reason}")
        second_best: list[Captured] = []
        ways = [self._export, self._trace] if prefer == "export" else [self._trace, self._export]
        for way in ways:
            captured, reason = way()
            if captured is not None and reason is None:
                return captured
            if (
                captured is not None
                and len(captured.layers) >= self._num_stages
                and self._demand(captured) is None
            ):
                second_best.append(captured)
        if not second_best:
            raise ValueError(
                f"the model ({type(root).__name__}, in {'train' if root.training else 'eval'} "
                f"mode) could not be captured for {self._num_stages} stages: "
                f"{'; '.join(self._reasons)}. Pass a list of modules (one for each stage), or "
                "change what the reasons name"
            )
        # Names that neither graph knows are told where the names are looked up.
        best = min(second_best, key=lambda captured: len(_unknown(captured, self._names)))
        return dataclasses.replace(best, notes=tuple(dict.fromkeys([*best.notes, *self._reasons])))

    def _trace(self) -> tuple[Captured | None, str | None]:
        scratch = structural_clone(self._root, {})
        try:
            graph, leaves = trace(scratch, self._layout)
        except Exception as error:
            return self._failed("fx", reason_of(error))
        notes = [f"{name} is called as a whole: {why}" for name, why in leaves.items()]
        notes = [*self._reasons, *notes]
        captured = build_captured(self._root, "fx", graph, self._layout, notes, scratch)
        reason = self._why_not(captured) or _why_unbalanced(captured, self._num_stages, leaves)
        return self._failed("fx", reason, captured) if reason else (captured, None)

    def _export(self) -> tuple[Captured | None, str | None]:
        notes = tuple(self._reasons)
        try:
            graph, module = export(structural_clone(self._root, {}), self._layout, self._replicated)
        except Exception as error:
            return self._failed("export", reason_of(error))
        captured = build_captured(self._root, "export", graph, self._layout, notes, module)
        reason = self._why_not(captured)
        return self._failed("export", reason, captured) if reason else (captured, None)

    def _failed(
        self, way: str, reason: str, captured: Captured | None = None
    ) -> tuple[Captured | None, str | None]:
        self._reasons.append(f"{way}: {reason}")
        return captured, reason

    def _why_not(self, captured: Captured) -> str | None:
        if len(captured.layers) < self._num_stages:
            return f"{len(captured.layers)} layers, num_stages: {self._num_stages}"
        unknown = _unknown(captured, self._names)
        if unknown:
            return f"split names {unknown[0]!r}, where its graph has no layer"
        return self._demand(captured)


def split_model_args(
    captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The values of ``captured.model_inputs`` in a call, in that order.

    Raises:
        ValueError, TypeError: the call differs from the example call in more than its tensors (see
            :meth:`CallLayout.take`).
    """
    values = captured.layout.take(args, kwargs)
    return [values[position] for position in captured.input_positions]


def _checked(root: nn.Module, captured: Captured) -> Captured:
    """Tells a model that refuses the example arguments from one that fake tensors cannot run.

    Only a layer that failed on fake tensors makes this run the model itself, on copies of its
    buffers.
    """
    error = captured.costs.error
    if error is None:
        return captured
    clone = structural_clone(root, {}, copies_of_buffers(root))
    examples = [leaf.example.detach().clone() for leaf in captured.layout.tensors]
    args, kwargs = captured.layout.rebuild(examples)
    try:
        with random_state_kept(), torch.no_grad():
            clone(*args, **kwargs)
    except Exception as refusal:
        raise ValueError(
            f"the model refuses the example arguments: {reason_of(refusal)}"
        ) from refusal
    note = f"costs of {', '.join(captured.costs.unknown)} are guessed: {reason_of(error)}"
    return dataclasses.replace(captured, notes=(*captured.notes, note))


def _check_rows(layout: CallLayout, replicated: set[str]) -> None:
    first: tuple[str, int] | None = None
    for leaf in layout.tensors:
        if not carries_batch(leaf, replicated):
            continue
        if leaf.example.dim() == 0 or leaf.example.shape[0] == 0:
            raise ValueError(
                f"example argument {leaf.path} has shape {tuple(leaf.example.shape)}: dimension 0 "
                "holds the batch's rows, at least 1; name it in replicated= if it has none"
            )
        rows = leaf.example.shape[0]
        first = first or (leaf.path, rows)
        if rows != first[1]:
            raise ValueError(
                f"example argument {leaf.path} has {rows} rows, {first[0]} has {first[1]}: every "
                "tensor is split into microbatches along dimension 0; name it in replicated= if "
                "it is to be passed whole"
            )


def _why_not_sequential(
    root: nn.Sequential, layout: CallLayout, num_stages: int, names: Sequence[str]
) -> str | None:
    if not is_plain_sequential(root):
        return "its forward is not nn.Sequential's"
    if len(root) < num_stages:
        return f"{len(root)} children, num_stages: {num_stages}"
    if len(layout.args) + len(layout.kwargs) != 1:
        raise ValueError(
            f"example_args and example_kwargs give {len(layout.args) + len(layout.kwargs)} "
            "arguments: nn.Sequential takes 1"
        )
    inner = [name for name in names if name not in root._modules]
    if inner:
        return f"split names {inner[0]!r}, which is not one of its children"
    return None


def _unknown(captured: Captured, names: Sequence[str]) -> list[str]:
    known = first_layers(captured)
    return [name for name in names if name not in known]


def _why_unbalanced(captured: Captured, num_stages: int, leaves: Mapping[str, str]) -> str | None:
    """A module that could not be traced and is too large for stages of equal cost."""
    for what, sizes in (
        ("cost", [layer.forward_cost + layer.backward_cost for layer in captured.layers]),
        ("parameters", [layer.parameter_bytes for layer in captured.layers]),
    ):
        for layer, size in zip(captured.layers, sizes, strict=True):
            if layer.name in leaves and size * num_stages > 1.1 * sum(sizes):
                return (
                    f"{layer.name} has {size / sum(sizes):.0%} of the {what}, num_stages: "
                    f"{num_stages}, and cannot be traced: {leaves[layer.name]}"
                )
    return None
