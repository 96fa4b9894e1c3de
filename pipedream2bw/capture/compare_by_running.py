"""Whether a graph is the model's own program, where fake tensors cannot tell: both compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..model.clone import trial_copy
from ..model.hooks import hooked_by_forward
from ..model.surroundings import random_state_kept
from .arguments import CallSignature
from .attribute import Attribute, GraphRun
from .carried_state import run_forward
from .operator_calls import OperatorCalls, Recorded
from .tracing import reason_of


def compare_by_running(
    root: nn.Module,
    graph: fx.Graph,
    attribute_of: Callable[[fx.Node], Attribute],
    examples: Sequence[torch.Tensor],
    call: CallSignature,
    whole: Collection[str],
) -> tuple[str | None, set[str]]:
    """Runs a graph and its model on copies.

    Returns:
        Why the graph cannot stand for the model, None if it can or if the model refuses its
        arguments; and the names of the modules on which either registers hooks.
    """
    hooked: set[str] = set()

    def copies() -> tuple[nn.Module, list[torch.Tensor]]:
        return trial_copy(root), [example.detach().clone() for example in examples]

    try:
        clone, tensors = copies()
        with random_state_kept():
            models, carried = run_forward(clone, tensors, call, whole)
        hooked |= hooked_by_forward(root, clone)
    except Exception:  # found out where the model is called for that
        return None, hooked
    clone, tensors = copies()
    calls, run = OperatorCalls(), GraphRun(clone, graph, attribute_of)
    calls.begin(clone, tensors)
    try:
        with random_state_kept(), Recorded(calls):
            calls.end(pytree.tree_leaves(run.run(*tensors)))
    except Exception as error:
        return why_unfit(f"it fails: {reason_of(error)}", carried), hooked
    hooked |= hooked_by_forward(root, clone)
    return why_unfit(run.why_not_repeated or calls.difference(models), carried), hooked


def why_unfit(difference: str | None, carried: str | None) -> str | None:
    """Says why a graph cannot stand for its model, None if it can.

    Args:
        difference: how what the graph calls differs from what the model calls.
        carried: the attributes by which the model's forwards depend on earlier ones.
    """
    if carried is not None:
        return (
            f"a forward computes with what an earlier one left in {carried}, of which the stages "
            "have copies: keep it in a buffer, and write to that in place (self.calls.add_(1))"
        )
    return difference and f"the graph is another program than the model: {difference}"
