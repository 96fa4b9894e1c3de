"""What each way of capture makes of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import fx, nn

from .shape_rule import ShapeRule


@dataclasses.dataclass(kw_only=True)
class Traced:
    """The graph that a way of capture makes of a model.

    Attributes:
        graph: its placeholders are the tensors of the example call in order; call_module and
            get_attr nodes name modules, parameters and buffers as the model does. The output node's
            ``meta["out_spec"]``, if any, restores the type of the model's output.
        module: has what the graph's other names refer to (constants, regions).
        leaves: the modules that could not be traced and are called as a whole, with the reason.
        shape_rule: the shapes of arguments that the graph is valid for; None: all.
        changes_attributes: whether a forward of the model may change attributes of its modules.
    """

    graph: fx.Graph
    module: nn.Module
    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shape_rule: ShapeRule | None = None
    changes_attributes: bool = True


def reason_of(error: BaseException) -> str:
    """Describes an error in a line: its type and the first line of its text."""
    text = " ".join(next(iter(str(error).strip().splitlines()), "").split())
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
