"""From a user's model to a graph of layers that can be cut into stages.

Four ways, tried in this order: lists of modules and nn.Sequential are taken as they are, anything
else is traced by torch.fx, what fx cannot trace by torch.export, and what that would change by
Dynamo. All give one graph whose computing nodes are the layers, so cutting, costs and code
generation know only one form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..model.clone import structural_clone, trial_copy
from ..model.surroundings import plain_modes, random_state_kept
from .arguments import CallSignature
from .bytecode import read_bytecode
from .captured import Captured, Draft
from .chain import ModuleChain, as_root, chained, is_plain_sequential
from .exporting import export
from .layer_names import first_layers
from .traced import Traced, reason_of
from .tracing import trace


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
    first = root.children_in_order()[0] if isinstance(root, ModuleChain) else root
    signature = CallSignature(first.forward, tuple(example_args), dict(example_kwargs or {}))
    _check_rows(signature, set(replicated))
    search = _Search(
        root=root,
        signature=signature,
        num_stages=num_stages,
        names=() if isinstance(split, str) else tuple(split),
        replicated=set(replicated),
        dynamic_shapes=dynamic_shapes,
        demand=why_not or (lambda captured: None),
        balances=balances,
    )
    with plain_modes():
        return _checked(root, search.capture(prefer))


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


@dataclasses.dataclass(kw_only=True)
class _Search:
    """Tries the ways of capture until one serves; collects why the others do not."""

    root: nn.Module
    signature: CallSignature
    num_stages: int
    names: tuple[str, ...]
    replicated: set[str]
    dynamic_shapes: bool
    demand: Callable[[Captured], str | None]
    balances: bool
    reasons: list[str] = dataclasses.field(default_factory=list)

    def capture(self, prefer: str | None) -> Captured:
        root, signature = self.root, self.signature
        if isinstance(root, ModuleChain):
            return self._chained("list", root)
        if isinstance(root, nn.Sequential) and prefer in (None, "sequential"):
            reason = _why_not_sequential(root, signature, self.num_stages, self.names)
            if reason is None:
                return self._chained("sequential", root)
            self.reasons.append(f"sequential: {reason}")
        second_best: list[Draft] = []
        ways = ("fx", "export", "dynamo")
        for how in sorted(ways, key=lambda way: way != prefer):
            try:
                traced = self._traced(how)
            except Exception as error:
                self.reasons.append(f"{how}: {reason_of(error)}")
                continue
            draft = Draft(root, how, traced, signature, notes=self.reasons)
            sizes = draft.parameter_bytes
            if len(sizes) < self.num_stages:
                self.reasons.append(f"{how}: {len(sizes)} layers, num_stages: {self.num_stages}")
                continue
            # Costs, which take a run on fake tensors, are found where no other way serves.
            reason = self._why_unbalanced("parameters", sizes, draft) or self._why_not(draft)
            if reason is None:
                return draft.captured
            second_best.append(draft)
            self.reasons.append(f"{how}: {reason}")
        served = []
        for draft in second_best:
            captured = draft.captured
            if (reason := self._why_unfit(captured)) is None:
                served.append(captured)
            else:
                self.reasons.append(f"{captured.how}: {reason}")
        if not served:
            reasons = "; ".join(dict.fromkeys(self.reasons))
            raise ValueError(
                f"the model ({type(root).__name__}, in {'train' if root.training else 'eval'} "
                f"mode) could not be captured for {self.num_stages} "
                f"stage{'' if self.num_stages == 1 else 's'}: "
                f"{reasons}. Pass a list of modules (one for each stage), or change what the "
                "reasons name"
            )
        # Names that neither graph knows are refused where the stages' boundaries are chosen.
        best = min(served, key=lambda captured: len(_unknown(captured, self.names)))
        return dataclasses.replace(best, notes=tuple(dict.fromkeys([*best.notes, *self.reasons])))

    def _chained(self, how: str, root: ModuleChain | nn.Sequential) -> Captured:
        draft = Draft(root, how, chained(root, self.signature), self.signature)
        is_given = self.balances and draft.num_layers == self.num_stages
        return draft.dry_run(None) if is_given else draft.captured

    def _traced(self, how: str) -> Traced:
        # With dictionaries of buffers of its own: a forward may assign to them.
        buffers = {buffer: buffer for buffer in self.root.buffers()}
        scratch = structural_clone(self.root, {}, buffers, on_trial=True)
        if how == "fx":
            return trace(scratch, self.signature)
        make = export if how == "export" else read_bytecode
        return make(scratch, self.signature, self.replicated, dynamic_shapes=self.dynamic_shapes)

    def _why_unfit(self, captured: Captured) -> str | None:
        return captured.found.unfit or self.demand(captured)

    def _why_not(self, draft: Draft) -> str | None:
        captured = draft.captured
        if (reason := self._why_unfit(captured)) is not None:
            return reason
        if unknown := _unknown(captured, self.names):
            return f"split names {unknown[0]!r}, where its graph has no layer"
        costs = [
            (layer.name, layer.forward_cost + layer.backward_cost) for layer in captured.layers
        ]
        return self._why_unbalanced("cost", costs, draft)

    def _why_unbalanced(
        self, what: str, sizes: Sequence[tuple[str, float]], draft: Draft
    ) -> str | None:
        """Names a module that could not be traced and is too large for stages of equal cost."""
        whole, leaves = sum(size for _, size in sizes), draft.traced.leaves
        for name, size in sizes:
            if name in leaves and size * self.num_stages > 1.1 * whole:
                return (
                    f"{name} has {size / whole:.0%} of the {what}, num_stages: {self.num_stages}, "
                    f"and cannot be traced: {leaves[name]}"
                )
        return None


def _checked(root: nn.Module, captured: Captured) -> Captured:
    """Refuses a model that no graph can stand for.

    Where a layer failed on fake tensors the model runs, on copies of all that it may write to, to
    see whether its arguments are wrong.
    """
    if captured.found.unfit is not None:
        raise ValueError(f"the model ({type(root).__name__}): {captured.found.unfit}")
    error = captured.found.error
    if error is None:
        return captured
    clone = trial_copy(root)
    examples = [leaf.example.detach().clone() for leaf in captured.signature.tensors]
    args, kwargs = captured.signature.rebuild(examples)
    try:
        with random_state_kept(), torch.no_grad():
            clone(*args, **kwargs)
    except Exception as refusal:
        raise ValueError(
            f"the model refuses the example arguments: {reason_of(refusal)}"
        ) from refusal
    note = f"costs of {', '.join(captured.found.unknown)} are guessed: {reason_of(error)}"
    return dataclasses.replace(captured, notes=(*captured.notes, note))


def _check_rows(signature: CallSignature, replicated: set[str]) -> None:
    first: tuple[str, int] | None = None
    for leaf in signature.tensors:
        if not leaf.carries_batch(replicated):
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
    root: nn.Sequential, signature: CallSignature, num_stages: int, names: Sequence[str]
) -> str | None:
    if not is_plain_sequential(root):
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


def _unknown(captured: Captured, names: Sequence[str]) -> list[str]:
    known = first_layers(captured)
    return [name for name in names if name not in known]
