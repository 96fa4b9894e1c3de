"""Whether a graph can stand for its model, whose own forward runs to tell.

The graph must call the operators that the model calls, on the same values. And the model must not
compute with what an earlier forward left in its plain attributes: a graph has such a value as it
was when the graph was made. A module that stages call as a whole is there once for each weight
version. A cache that the first forward fills, a counter with which nothing is computed, and what is
kept for somebody else to read, are none of these: the second and the third forward call the same
operators on the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..model.clone import trial_copy
from ..model.hooks import hooked_by_forward
from ..model.replacing import attributes_of
from ..model.sources import sources_kept
from .arguments import CallSignature
from .operator_calls import GraphRun, OperatorCalls, Recorded
from .parameter_writes import ParameterWrites
from .traced import reason_of


@dataclasses.dataclass
class PlainAttributes:
    """What the modules of a model hold in attributes that are neither weights nor buffers.

    Attributes:
        model: the model, as it is now.
        whole: names of modules that stages call as a whole. What these put into a list, a
            dictionary or a tensor, all copies of the module share: the attribute alone counts.
        tensors: those found, each under a name that it loses when it is written to.
        shown: by attribute, what tells its value from others.
    """

    model: nn.Module
    whole: Collection[str]
    tensors: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list, repr=False)
    shown: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    _alive: list[Any] = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            depth = 0 if any(f"{name}.".startswith(f"{each}.") for each in self.whole) else 3
            for attribute, value in attributes_of(module):
                if attribute not in ("_parameters", "_buffers"):
                    path = f"{name}.{attribute}" if name else attribute
                    self.shown[path] = self._shown(value, depth)

    def changed(self) -> list[str]:
        """Names the attributes that are no longer what they were."""
        now = PlainAttributes(self.model, self.whole).shown
        before = self.shown
        return [name for name in now if name not in before or now[name] != before[name]]

    def _shown(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if depth and isinstance(value, (list, tuple)):
            return [self._shown(item, depth - 1) for item in value]
        if depth and isinstance(value, dict):
            return {id(key): self._shown(item, depth - 1) for key, item in value.items()}
        self._alive.append(value)  # so that nothing else gets its id
        if not isinstance(value, torch.Tensor):
            return id(value)
        writes = 0 if value.is_inference() else value._version
        self.tensors.append((f"tensor {id(value)}, {writes}", value))
        return id(value), writes if depth else 0


def note_changes(model: nn.Module) -> Callable[[], bool]:
    """Makes a clone notice, from now on, whether its forward changes an attribute.

    For torch.export, which runs the forward anyway, and puts attributes back.
    """
    forward, found = model.forward, []

    @functools.wraps(forward)
    def noticing(*args: Any, **kwargs: Any) -> Any:
        before, parameters = PlainAttributes(model, ()), ParameterWrites(model)
        result = forward(*args, **kwargs)
        parameters.check(model)
        found.append(bool(before.changed()))
        return result

    model.forward = noticing
    return lambda: any(found)


def why_unfit(
    model: nn.Module,
    examples: Sequence[torch.Tensor],
    call: CallSignature,
    whole: Collection[str],
    difference: Callable[[OperatorCalls], str | None] | None,
) -> str | None:
    """Says why a graph cannot stand for a model, None if it can.

    Args:
        model: a clone on trial, whose forward runs: three times if the first one changes an
            attribute.
        whole: as in :class:`PlainAttributes`.
        difference: how the graph differs from what the model calls; None: it does not.
    """

    def run(calls: OperatorCalls, *, records: bool = True) -> OperatorCalls:
        calls.begin(model, examples)
        args, kwargs = call.rebuild(list(examples))
        # Each run draws the numbers that the others draw.
        with sources_kept(model), Recorded(calls) if records else contextlib.nullcontext():
            calls.end(pytree.tree_leaves(model.forward(*args, **kwargs)))
        return calls

    def run_after(earlier: OperatorCalls, attributes: PlainAttributes) -> OperatorCalls:
        calls = earlier.next()
        calls.name(attributes.tensors)
        return run(calls)

    before = PlainAttributes(model, whole)
    first = run(OperatorCalls(), records=difference is not None)
    if before.changed():
        second = run_after(first, PlainAttributes(model, whole))
        between = PlainAttributes(model, whole)
        third = run_after(second, between)
        names = between.changed()
        if names and third.difference(second) is not None:
            return (
                f"a forward computes with what an earlier one left in {', '.join(names)}, of which "
                "the stages have copies: keep it in a buffer, and write to that in place "
                "(self.calls.add_(1))"
            )
    reason = difference and difference(first)
    return reason and f"the graph is another program than the model: {reason}"


def why_unfit_by_values(
    root: nn.Module,
    run_of: Callable[[nn.Module], GraphRun],
    examples: Sequence[torch.Tensor],
    call: CallSignature,
    whole: Collection[str],
) -> tuple[str | None, set[str]]:
    """As :func:`why_unfit` where fake tensors cannot tell: graph and model compute, on copies.

    Returns:
        The reason, None if there is none or if the model refuses its arguments; and the names of
        the modules on which either registers hooks.
    """

    def copies() -> tuple[nn.Module, list[torch.Tensor]]:
        return trial_copy(root), [example.detach().clone() for example in examples]

    graphs, tensors = copies()
    run = run_of(graphs)
    difference = run.difference
    try:
        with sources_kept(root):
            run.record(tensors)
    except Exception as error:
        failure = f"it fails: {reason_of(error)}"
        difference = lambda models: failure  # noqa: E731
    models, tensors = copies()
    writes = ParameterWrites(models)
    try:
        with writes:
            reason = why_unfit(models, tensors, call, whole, difference)
    except Exception:  # found out where the model is called for that
        reason = None
    writes.check(models)
    return reason, hooked_by_forward(root, graphs) | hooked_by_forward(root, models)


def refuse_writes_by_values(
    root: nn.Module, examples: Sequence[torch.Tensor], call: CallSignature
) -> None:
    """Has a copy compute; raises WrittenParameterError if it writes to a parameter."""
    model = trial_copy(root)
    writes = ParameterWrites(model)
    args, kwargs = call.rebuild([example.detach().clone() for example in examples])
    with contextlib.suppress(Exception), sources_kept(root), writes, torch.no_grad():
        model(*args, **kwargs)
    writes.check(model)
