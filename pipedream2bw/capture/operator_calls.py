"""Which operators a forward calls, and on which values: whether a graph is the model's own.

Symbolic tracing takes the way through the model's Python code that stand-ins for tensors take.
Where that looks at a value's type, or keeps something in an attribute of a value, the graph is
another program. So both are run on fake tensors, and what they call is compared; or on real ones,
where these cannot tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.clone import trial_copy
from ..model.hooks import hooked_by_forward
from ..model.storages import storage_of
from ..model.surroundings import random_state_kept
from ..model.trees import tensors_in
from .arguments import CallSignature
from .attribute import Attribute
from .tracing import reason_of


@dataclasses.dataclass
class OperatorCalls:
    """The operators that a run calls, with what they take.

    A tensor stands for the call that last wrote to its storage, or for its name, and for the part
    of the storage that it shows. What depends on no named tensor is a constant: it may have been
    computed when the graph was made. A call is the same in two runs if the calls that it depends on
    are, in whatever order.

    Attributes:
        operators: by call, a digest of the operator and its arguments, the operator.
        returned: the values that the run gives, once :meth:`end` was called.
    """

    operators: dict[str, str] = dataclasses.field(default_factory=dict)
    returned: str = ""
    _written: dict[int, str] = dataclasses.field(default_factory=dict, repr=False)
    _alive: list[Any] = dataclasses.field(default_factory=list, repr=False)

    def begin(self, root: nn.Module, examples: Iterable[torch.Tensor]) -> None:
        """Names the tensors that there are before the run: those of the model and its arguments."""
        named = [*root.named_parameters(), *root.named_buffers()]
        for name, tensor in [*named, *((f"input {i}", each) for i, each in enumerate(examples))]:
            self._written.setdefault(storage_of(tensor), name)
            self._alive.append(tensor)  # a storage's number is only unique while it lives

    def add(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds a call that has returned ``result``."""
        if operator.namespace == "prim":  # reads a tensor's property
            return
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
        if not draws and not any(map(self._is_known, tensors_in((args, kwargs)))):
            return
        shown = f"{operator}{self._shown((args, kwargs))}"
        call = next(  # what draws gives other values each time
            call
            for number in itertools.count()
            if (call := hashlib.sha256(f"{shown}{number}".encode()).hexdigest())
            not in self.operators
        )
        self.operators[call] = str(operator)
        writes = not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable
        for tensor in tensors_in(result):
            if writes or not self._is_known(tensor):
                self._written[storage_of(tensor)] = call
        self._alive.append(result)

    def end(self, leaves: Iterable[Any]) -> None:
        """Says what the run gives; outputs that are None may be left out of one of the two."""
        self.returned = self._shown([leaf for leaf in leaves if leaf is not None])

    def difference(self, models: OperatorCalls) -> str | None:
        """Says how these calls of a graph differ from the model's; None if they do not."""
        for call, operator in self.operators.items():
            if call not in models.operators:
                return f"the model calls no {operator} on these values"
        for call, operator in models.operators.items():
            if call not in self.operators:
                return f"it lacks {operator}"
        return None if self.returned == models.returned else "it returns other values"

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._written

    def _shown(self, tree: Any) -> str:
        return repr(pytree.tree_map(self._leaf, tree))

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = self._written.get(storage_of(leaf), "constant")
        return (where, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype)


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, ``calls`` gets every operator that is called."""

    def __init__(self, calls: OperatorCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.add(func, args, kwargs or {}, result)
        return result


def compare_by_running(
    root: nn.Module,
    graph: fx.Graph,
    attribute_of: Callable[[fx.Node], Attribute],
    examples: Sequence[torch.Tensor],
    call: CallSignature,
) -> tuple[str | None, set[str]]:
    """Runs a graph and its model on copies, where fake tensors would need values.

    Returns:
        How what the graph calls differs from what the model calls, None if it does not or if the
        model refuses its arguments; and the names of the modules on which either registers hooks.
    """

    def calls_of(run: Callable[[nn.Module, list[torch.Tensor]], Any]) -> OperatorCalls:
        clone = trial_copy(root)
        tensors = [example.detach().clone() for example in examples]
        calls = OperatorCalls()
        calls.begin(clone, tensors)
        with random_state_kept(), Recorded(calls):
            calls.end(pytree.tree_leaves(run(clone, tensors)))
        hooked.update(hooked_by_forward(root, clone))
        return calls

    def run_model(clone: nn.Module, tensors: list[torch.Tensor]) -> Any:
        args, kwargs = call.rebuild(tensors)
        return clone.forward(*args, **kwargs)

    def run_graph(clone: nn.Module, tensors: list[torch.Tensor]) -> Any:
        return _GraphRun(clone, graph, attribute_of).run(*tensors)

    hooked: set[str] = set()
    try:
        models = calls_of(run_model)
    except Exception:  # found out where the model is called for that
        return None, hooked
    try:
        return calls_of(run_graph).difference(models), hooked
    except Exception as error:
        return f"it fails: {reason_of(error)}", hooked


class _GraphRun(fx.Interpreter):
    """Runs a graph whose attributes are those of a clone of the model."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, attribute_of: Callable[[fx.Node], Attribute]
    ) -> None:
        super().__init__(root, graph=graph)
        self._root, self._attribute_of = root, attribute_of

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_module", "get_attr"):
            return super().run_node(n)
        found = self._attribute_of(n).found_in(self._root)
        if n.op == "get_attr":
            return found
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return found(*args, **kwargs)
