"""Which operators a forward calls, and on which values: whether a graph is the model's own.

Symbolic tracing takes the way through the model's Python code that stand-ins for tensors take.
Where that looks at a value's type, or keeps something in an attribute of a value, the graph is
another program. So both are run, and what they call is compared.
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

from ..model.storages import storage_of
from ..model.trees import tensors_in
from .attribute import Attribute


@dataclasses.dataclass
class OperatorCalls:
    """The operators that a run calls, with what they take.

    A tensor stands for the call that last wrote to its storage, or for its name. It also stands for
    the part of the storage that it shows. What depends on no named tensor is a constant: it may
    have been computed when the graph was made. A call is the same in two runs if the calls that it
    depends on are, in whatever order, and however often: autograd of torch 2.9 repeats some for
    each mode.

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
        self.name([*named, *((f"input {i}", each) for i, each in enumerate(examples))])

    def name(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Gives tensors their names; of several that share a storage the first one's stays."""
        self._written |= {storage_of(tensor): name for name, tensor in reversed(named)}
        # A storage's number is only unique while it lives.
        self._alive += [tensor for _, tensor in named]

    def next(self) -> OperatorCalls:
        """Makes the record of a further run, which may take what this run has left."""
        return OperatorCalls(_written=dict(self._written), _alive=list(self._alive))

    def add(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds a call that has returned ``result``."""
        if operator.namespace == "prim":  # reads a tensor's property
            return
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
        if not draws and not any(map(self._is_known, tensors_in((args, kwargs)))):
            return
        shown = f"{operator}{self._shown((args, kwargs))}"
        writes = not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable
        call = next(  # what draws or writes gives other values each time
            call
            for number in itertools.count()
            if (call := hashlib.sha256(f"{shown}{number}".encode()).hexdigest())
            not in self.operators
            or not (draws or writes)
        )
        self.operators[call] = str(operator)
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


class GraphRun(fx.Interpreter):
    """Runs a graph whose attributes are those of ``root``."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, attribute_of: Callable[[fx.Node], Attribute]
    ) -> None:
        super().__init__(root, graph=graph)
        self._root, self._attribute_of = root, attribute_of
        self._calls = OperatorCalls()
        made = (node for node in graph.nodes if _MADE_BY_TRACING in str(node.target))
        constants = [attribute_of(node).value for node in made if node.op == "get_attr"]
        self._constants = [
            (value, value._version)
            for value in constants
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def attribute(self, node: fx.Node) -> Any:
        """What a get_attr or call_module node refers to."""
        return self._attribute_of(node).found_in(self._root)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node as torch.fx does, but for what its attribute is."""
        if n.op == "get_attr":
            return self.attribute(n)
        return self.compute(n, *self.fetch_args_kwargs_from_env(n))

    def compute(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a node from the values of its arguments."""
        if node.op == "call_module":
            return self.attribute(node)(*args, **kwargs)
        return getattr(self, node.op)(node.target, args, kwargs)

    def record(self, examples: Sequence[torch.Tensor]) -> None:
        """Runs the graph and remembers what it calls."""
        self._calls.begin(self._root, examples)
        with Recorded(self._calls):
            self._calls.end(pytree.tree_leaves(self.run(*examples)))

    def difference(self, models: OperatorCalls) -> str | None:
        """Says how the graph, once recorded, differs from the model; None if it does not."""
        if any(value._version != version for value, version in self._constants):
            return "it writes in place to a tensor that was made while tracing"
        return self._calls.difference(models)


_MADE_BY_TRACING = "_tensor_constant"
"""What torch.fx calls tensors that a forward makes of nothing that is traced."""
