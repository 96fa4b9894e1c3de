"""What the layers of a captured graph do, found by running it once on fake tensors.

The run shows which values share memory, which layers write in place and which draw random numbers.
That decides where the graph may be cut. Costs, which decide between cuts, are counted beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from .. import _C
from ..model.clone import copies_of_plain_tensors, structural_clone
from ..model.hooks import hooked_by_forward
from ..model.local_shards import is_dtensor
from ..model.sources import sources_kept
from ..model.storages import storage_of
from ..model.surroundings import torch_reports_silenced
from ..model.trees import tensors_in
from .arguments import CallSignature
from .attribute import Attribute, nodes_with_attributes
from .costs import CostCounter, LayerCosts
from .operator_calls import GraphRun
from .own_program import PlainAttributes, refuse_writes_by_values, why_unfit, why_unfit_by_values
from .parameter_writes import ParameterWrites, WrittenParameterError

_PLACE = (0, 0, _C.ALL_DRAWS, 0)  # of random numbers
ANY_DRAWS = 2**32
"""More than any layer draws: what it draws has the numbers that the unsplit model's has."""

FAKE_LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""What fake tensors cannot do although the model may be right."""


@dataclasses.dataclass(kw_only=True)
class Findings:
    """What a dry run found out, by layer (in execution order) and by value (node name).

    Attributes:
        written_buffers: names of the buffers that some layer writes, or may write.
        guessed_buffers: names of those that layers may write of which that is not known.
        bonds: (first layer, last layer, value and why) of layers that have to see one tensor: it is
            read after a write in place, the last layer differentiates by it, or it is a DTensor,
            which no other process would have.
        sizes: names of the values that are integers or tuples of integers: on fake tensors these
            can only come from shapes.
        storages: the storages of each value (see :func:`storage_of`).
        writes: the storages of values that each layer writes in place.
        draws: how often each layer draws random numbers; ``ANY_DRAWS`` where that is not known.
        unknown: names of the layers that could not be run on fake tensors.
        error: the first failure that may mean that the model refuses its arguments.
        hooked: names of the modules on which the graph's layers registered hooks.
        unfit: why the graph cannot stand for the model; None where it can, and where that was not
            asked for or cannot be known.
        costs: what the layers cost; None: it was not counted.
    """

    written_buffers: set[str] = dataclasses.field(default_factory=set)
    guessed_buffers: set[str] = dataclasses.field(default_factory=set)
    bonds: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    sizes: set[str] = dataclasses.field(default_factory=set)
    storages: dict[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    writes: list[frozenset[int]] = dataclasses.field(default_factory=list)
    draws: list[int] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    hooked: set[str] = dataclasses.field(default_factory=set)
    unfit: str | None = None
    costs: LayerCosts | None = None


def dry_run(
    root: nn.Module,
    graph: fx.Graph,
    attribute_of: Callable[[fx.Node], Attribute],
    examples: Sequence[torch.Tensor],
    counter: CostCounter | None = None,
    *,
    call: CallSignature | None = None,
    compares: bool = False,
    is_chain: bool = False,
) -> Findings:
    """Runs ``graph`` on fake copies of ``root``'s tensors and of ``examples``.

    Nothing is computed, and the model, its buffers and the random state stay as they are.
    ``counter`` counts what the layers cost. ``call`` has the model called, too, to see whether its
    forwards depend on earlier ones. With ``compares`` it tells whether they call the operators that
    the graph calls. Where fake tensors are not enough for that, copies of the model compute. A run
    of ``is_chain`` is the model's forward: if it changes no attribute, no later one depends on it.

    Raises:
        WrittenParameterError: a forward writes to a parameter.
    """
    named = [attribute_of(node) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    whole = [attribute.target for attribute in named if attribute.kind == "module"]
    with torch_reports_silenced():
        dry = _DryRun(root, graph, attribute_of, examples, counter=counter)
        before = dry.attributes(whole) if is_chain else None
        found = dry.findings(records=compares)
        if call is None:
            return found
        is_told = not found.unknown
        if is_told and (before is None or before.changed()):
            try:
                found.unfit = dry.why_unfit(call, whole, compares=compares)
            except WrittenParameterError:
                raise
            except Exception:  # the forward depends on values, or refuses its arguments
                is_told = False
        if compares and not is_told:
            run_of = functools.partial(GraphRun, graph=graph, attribute_of=attribute_of)
            found.unfit, hooked = why_unfit_by_values(root, run_of, examples, call, whole)
            found.hooked |= hooked
        elif not is_told:
            refuse_writes_by_values(root, examples, call)
        return found


class _DryRun(GraphRun):
    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        attribute_of: Callable[[fx.Node], Attribute],
        examples: Sequence[torch.Tensor],
        *,
        counter: CostCounter | None,
    ) -> None:
        self._original = root
        self._counter = counter
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = {old: self._fake_parameter(old) for old in root.parameters()}
        buffers = {old: self._mode.from_tensor(old.detach()) for old in root.buffers()}
        # A forward may register hooks, set attributes that say so, and write to tensors there.
        state = {**copies_of_plain_tensors(root), **buffers}
        self._clone = functools.partial(structural_clone, root, parameters, state, on_trial=True)
        super().__init__(self._clone(), graph, attribute_of)
        self._buffer_names = {id(buffers[old]): name for name, old in root.named_buffers()}
        self._examples = [self._mode.from_tensor(example.detach()) for example in examples]
        self._layers: list[fx.Node] = []
        self._missing: set[fx.Node] = set()
        self._kept_alive: list[Any] = []
        self._dtensors: list[fx.Node] = []
        self._result = Findings()
        self._writes = ParameterWrites(self._root)
        if counter is not None:
            counter.begin([*self._root.parameters(), *self._root.buffers()], self._examples)

    def findings(self, *, records: bool) -> Findings:
        with self._faked(), sources_kept(self._original):
            if records:
                self.record(self._examples)
            else:
                self.run(*self._examples)
        self._writes.check(self._root)
        self._result.bonds = [
            *_stale_reads(self._layers, self._result),
            *_differentiated(self._layers),
            *_read_as_dtensors(self._layers, self._dtensors),
        ]
        self._result.hooked = hooked_by_forward(self._original, self._root)
        if self._counter is not None:
            self._result.costs = self._counter.end()
        return self._result

    def attributes(self, whole: Collection[str]) -> PlainAttributes:
        return PlainAttributes(self._root, whole)

    def why_unfit(
        self, call: CallSignature, whole: Collection[str], *, compares: bool
    ) -> str | None:
        """Why the graph cannot stand for the model, see :func:`own_program.why_unfit`."""
        difference = self.difference if compares else None
        clone = self._clone()
        with self._faked():
            reason = why_unfit(clone, self._examples, call, whole, difference)
        self._writes.check(clone)
        return reason

    @contextlib.contextmanager
    def _faked(self) -> Iterator[None]:
        with self._mode, self._writes, _C.KeyedRandom(_PLACE, counts_fakes=True):
            yield

    def run_node(self, n: fx.Node) -> Any:
        if not n.op.startswith("call_"):
            value = super().run_node(n)
            if n.op == "placeholder":
                self._record(n, value)
            return value
        self._layers.append(n)
        parameters, buffers = self._held_by(n)
        if any(value in self._missing for value in n.all_input_nodes):
            self._unknown(n, parameters, buffers)
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        inputs = tensors_in((args, kwargs))
        versions = [item._version for item in inputs]
        buffer_versions = [item._version for item in buffers]
        counter = self._counter
        num_drawn = _num_drawn()
        try:
            with contextlib.nullcontext() if counter is None else counter.counting():
                value = self.compute(n, args, kwargs)
        except Exception as error:
            if not isinstance(error, FAKE_LIMITS):
                self._result.error = self._result.error or error
            self._unknown(n, parameters, buffers)
            return None
        self._record(n, value)
        self._result.draws.append(_num_drawn() - num_drawn)
        written = [item for item, old in zip(inputs, versions, strict=True) if item._version != old]
        self._result.writes.append(
            frozenset(storage_of(item) for item in written if id(item) not in self._buffer_names)
        )
        statistics = self._statistics(n)
        for item, old in zip(buffers, buffer_versions, strict=True):
            if item._version != old or id(item) in statistics:
                self._result.written_buffers.add(self._buffer_names[id(item)])
        if counter is not None:
            counter.count_layer(parameters, inputs, value)
        return value

    def _fake_parameter(self, old: nn.Parameter) -> Any:
        if type(old) is nn.Parameter:  # a fake copy of a parameter is one; that of a subclass's not
            return self._mode.from_tensor(old)
        return nn.Parameter(self._mode.from_tensor(old.detach()), old.requires_grad)

    def _statistics(self, node: fx.Node) -> set[int]:
        """Returns the ids of running statistics that a layer writes: no version counts that."""
        written: list[Any] = []
        if node.op == "call_module":
            for module in self.attribute(node).modules():
                if isinstance(module, _NormBase) and module.training:
                    written.extend(module.buffers(recurse=False))
        elif "batch_norm" in str(node.target) and (
            node.args[5] if len(node.args) > 5 else node.kwargs.get("training")
        ):
            holders = (item for item in node.all_input_nodes if item.op == "get_attr")
            written.extend(map(self.attribute, holders))
        return set(map(id, written))

    def _unknown(
        self, node: fx.Node, parameters: list[nn.Parameter], buffers: list[torch.Tensor]
    ) -> None:
        self._missing.add(node)
        result = self._result
        result.unknown.append(node.name)
        result.draws.append(ANY_DRAWS)
        result.writes.append(frozenset())
        result.guessed_buffers.update(self._buffer_names[id(item)] for item in buffers)
        result.written_buffers |= result.guessed_buffers
        if self._counter is not None:
            self._counter.guess_layer(parameters)

    def _record(self, node: fx.Node, value: Any) -> None:
        self._kept_alive.append(value)  # a storage's number is only unique while it lives
        leaves, tensors = pytree.tree_leaves(value), tensors_in(value)
        if leaves and all(type(item) is int for item in leaves):
            self._result.sizes.add(node.name)
        self._result.storages[node.name] = frozenset(map(storage_of, tensors))
        if any(map(is_dtensor, tensors)):
            self._dtensors.append(node)
        if self._counter is not None:
            self._counter.count_value(node.name, value)

    def _held_by(self, node: fx.Node) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Returns the fake parameters and buffers that a layer uses."""
        parameters: list[nn.Parameter] = []
        buffers: list[torch.Tensor] = []
        for item in map(self.attribute, nodes_with_attributes(node)):
            if isinstance(item, nn.Parameter):
                parameters.append(item)
            elif isinstance(item, nn.Module):
                parameters.extend(item.parameters())
                buffers.extend(item.buffers())
            elif id(item) in self._buffer_names:
                buffers.append(item)
        return parameters, [item for item in buffers if id(item) in self._buffer_names]


def _stale_reads(layers: list[fx.Node], found: Findings) -> Iterable[tuple[int, int, str]]:
    """Yields what holds layers together because a value is read after a write to its memory.

    Gives the layer that makes the value, the last one that reads it, and a name for it: values from
    before the write, read after it.
    """
    index_of = {node: index for index, node in enumerate(layers)}
    for writer, storages in enumerate(found.writes):
        for storage in storages:
            # The values of that memory from before the write, with the layers that make them.
            older = {
                node: index_of.get(node, 0)
                for layer in layers
                for node in layer.all_input_nodes
                if storage in found.storages.get(node.name, ()) and index_of.get(node, 0) < writer
            }
            if not older:
                continue
            first = min(older.values())
            readers = [
                index
                for index in range(writer + 1, len(layers))
                if any(node in older for node in layers[index].all_input_nodes)
            ]
            taken = sum(node in older for node in layers[writer].all_input_nodes)
            if readers or taken > 1:
                name = next(iter(older)).name
                yield first, max([writer, *readers]), f"value {name!r}, which is written in place,"


def _differentiated(layers: list[fx.Node]) -> Iterable[tuple[int, int, str]]:
    """Yields what holds layers together because one of them calls ``torch.autograd.grad``.

    Its graph begins at the values by which it differentiates. Weights and the model's inputs are
    there from the first layer on.
    """
    index_of = {node: index for index, node in enumerate(layers)}
    for index, layer in enumerate(layers):
        if layer.target is torch.autograd.grad:
            inputs = layer.args[1] if len(layer.args) > 1 else layer.kwargs["inputs"]
            for node in pytree.tree_leaves(inputs):
                if isinstance(node, fx.Node):
                    what = f"value {node.name!r}, by which autograd.grad differentiates,"
                    yield index_of.get(node, 0), index, what


def _read_as_dtensors(
    layers: list[fx.Node], dtensors: list[fx.Node]
) -> Iterable[tuple[int, int, str]]:
    index_of = {node: index for index, node in enumerate(layers)}
    for node in dtensors:
        first = index_of.get(node, 0)
        last = max((index_of[user] for user in node.users if user in index_of), default=first)
        what = f"value {node.name!r}, a DTensor (use_local_output=True makes it a plain tensor),"
        yield first, last, what


def _num_drawn() -> int:
    place = _C.random_place()
    assert place is not None
    return place[1]
