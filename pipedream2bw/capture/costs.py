"""Costs of the layers, found by running the captured graph once on fake tensors.

Every rank gets the same costs, since every rank has to find the same stages. A nominal machine
turns counts of operations and bytes into seconds; only their ratios matter. The same run shows
which values share memory and which layers write in place, which decides where the graph may be cut.
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
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from ..model.clone import copies_of_plain_tensors, structural_clone
from ..model.hooks import hooked_by_forward
from ..model.storages import storage_of
from ..model.surroundings import torch_reports_silenced
from ..model.trees import bytes_in, tensors_in
from .arguments import CallSignature
from .attribute import Attribute, nodes_with_attributes
from .device_figures import NOMINAL, DeviceFigures, Work
from .graph_run import GraphRun
from .operator_flops import flops_of
from .own_program import why_unfit, why_unfit_by_values
from .saved_bytes import SavedBytes

# A nominal link between stages.
_LINK_BYTES_PER_SECOND = 2e9
_LINK_SECONDS_PER_TENSOR = 20e-6

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
class LayerCosts:
    """What the dry run found out, by layer (in execution order) and by value (node name).

    Attributes:
        forward, backward: nominal seconds of each layer.
        weight_grad: the part of ``backward`` for parameters.
        saved_bytes: bytes that autograd keeps of each layer, 0 if not asked for; a storage counts
            with the first layer that saves it; parameters, buffers and the graph's inputs do not
            count.
        kept: bytes that several layers save, with these layers.
        described: structure, shapes, dtypes and strides of each value.
        value_bytes: bytes of each value's tensors.
        crossing: nominal seconds that each value takes over a link between stages, its gradient
            included.
        written_buffers: names of the buffers that some layer writes.
        written_values: (first layer, last layer, value) where a value is read after a write in
            place; these layers have to see one tensor.
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
    """

    forward: list[float] = dataclasses.field(default_factory=list)
    backward: list[float] = dataclasses.field(default_factory=list)
    weight_grad: list[float] = dataclasses.field(default_factory=list)
    saved_bytes: list[int] = dataclasses.field(default_factory=list)
    kept: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    described: dict[str, str] = dataclasses.field(default_factory=dict)
    value_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    crossing: dict[str, float] = dataclasses.field(default_factory=dict)
    written_buffers: set[str] = dataclasses.field(default_factory=set)
    written_values: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    sizes: set[str] = dataclasses.field(default_factory=set)
    storages: dict[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    writes: list[frozenset[int]] = dataclasses.field(default_factory=list)
    draws: list[int] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    hooked: set[str] = dataclasses.field(default_factory=set)
    unfit: str | None = None


def dry_run(
    root: nn.Module,
    graph: fx.Graph,
    attribute_of: Callable[[fx.Node], Attribute],
    examples: Sequence[torch.Tensor],
    figures: DeviceFigures = NOMINAL,
    *,
    count_saved: bool = False,
    call: CallSignature | None = None,
    compares: bool = False,
) -> LayerCosts:
    """Runs ``graph`` on fake copies of ``root``'s tensors and of ``examples``.

    Nothing is computed, and the model, its buffers and the random state stay as they are. A layer
    that fake tensors cannot run gets a cost in proportion to its parameters. ``figures`` turn
    operations and bytes into seconds. ``count_saved`` fills ``saved_bytes``; fewer operators run
    then, because autograd makes no views. ``call`` has the model called, too, to see whether its
    forwards depend on earlier ones, and with ``compares`` whether they call the operators that the
    graph calls; where fake tensors are not enough for that, copies of the model compute.
    """
    with torch_reports_silenced():
        dry = _DryRun(root, graph, attribute_of, examples, figures=figures, count_saved=count_saved)
        costs = dry.costs(records=compares)
        if call is None:
            return costs
        named = [
            attribute_of(node) for node in graph.nodes if node.op in ("call_module", "get_attr")
        ]
        whole = [attribute.target for attribute in named if attribute.kind == "module"]
        is_told = not costs.unknown
        if is_told:
            try:
                costs.unfit = dry.why_unfit(call, whole, compares=compares)
            except Exception:  # the forward depends on values, or refuses its arguments
                is_told = False
        if compares and not is_told:
            run_of = functools.partial(GraphRun, graph=graph, attribute_of=attribute_of)
            costs.unfit, hooked = why_unfit_by_values(root, run_of, examples, call, whole)
            costs.hooked |= hooked
        return costs


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations and bytes moved, by operator.

    Args:
        free_ones_too: also counts operators that only make views or read a tensor's properties.
    """

    def __init__(self, *, free_ones_too: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._free_ones_too = free_ones_too
        self.work: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._free_ones_too and (func.is_view or func.namespace == "prim"):
            return result
        flops = flops_of(func, args, kwargs, result)
        first = next((item for item in args if isinstance(item, torch.Tensor)), None)
        dtype = first.dtype if flops and first is not None else torch.float32
        moved = 0 if func.is_view else bytes_in((args, kwargs, result))
        self.work.append(Work(flops, dtype, moved))
        return result


class _DryRun(GraphRun):
    def __init__(
        self,
        root: nn.Module,
        graph: fx.Graph,
        attribute_of: Callable[[fx.Node], Attribute],
        examples: Sequence[torch.Tensor],
        *,
        figures: DeviceFigures,
        count_saved: bool,
    ) -> None:
        self._original = root
        self._figures = figures
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = {old: self._fake_parameter(old) for old in root.parameters()}
        buffers = {old: self._mode.from_tensor(old.detach()) for old in root.buffers()}
        # A forward may register hooks, set attributes that say so, and write to tensors there.
        state = {**copies_of_plain_tensors(root), **buffers}
        self._clone = functools.partial(structural_clone, root, parameters, state, on_trial=True)
        super().__init__(self._clone(), graph, attribute_of)
        self._buffer_names = {id(buffers[old]): name for name, old in root.named_buffers()}
        self._examples = [self._mode.from_tensor(example.detach()) for example in examples]
        # For layers that cannot be counted: they multiply each parameter once for each position.
        self._positions = max((_positions(item) for item in self._examples), default=1)
        self._layers: list[fx.Node] = []
        self._missing: set[fx.Node] = set()
        self._kept_alive: list[Any] = []
        self._result = LayerCosts()
        held = (*self._root.parameters(), *self._root.buffers(), *self._examples)
        self._saved = SavedBytes(map(storage_of, held))
        self._counting = self._saved if count_saved else contextlib.nullcontext()

    def costs(self, *, records: bool) -> LayerCosts:
        with self._faked():
            if records:
                self.record(self._examples)
            else:
                self.run(*self._examples)
        self._result.written_values = list(_stale_reads(self._layers, self._result))
        self._result.kept = self._saved.saved_by_several()
        self._result.hooked = hooked_by_forward(self._original, self._root)
        return self._result

    def why_unfit(
        self, call: CallSignature, whole: Collection[str], *, compares: bool
    ) -> str | None:
        """Why the graph cannot stand for the model, see :func:`own_program.why_unfit`."""
        difference = self.difference if compares else None
        with self._faked():
            return why_unfit(self._clone(), self._examples, call, whole, difference)

    @contextlib.contextmanager
    def _faked(self) -> Iterator[None]:
        with self._mode, _C.KeyedRandom(_PLACE, counts_fakes=True):
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
        counter = _OperatorCounter(free_ones_too=self._figures.free_ones_too)
        num_drawn = _num_drawn()
        try:
            with counter, self._counting:
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
        self._cost(counter, parameters, inputs, value)
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

    def _cost(
        self,
        counter: _OperatorCounter,
        parameters: list[nn.Parameter],
        inputs: list[torch.Tensor],
        value: Any,
    ) -> None:
        result, seconds = self._result, self._figures.seconds
        result.saved_bytes.append(self._saved.end_part())
        result.forward.append(seconds(counter.work))
        if not any(item.requires_grad for item in tensors_in(value)):
            result.backward.append(0.0)
            result.weight_grad.append(0.0)
            return
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        held = {id(parameter) for parameter in parameters}
        upstream = any(item.requires_grad for item in inputs if id(item) not in held)
        backward = seconds(
            counter.work,
            arithmetic=bool(trainable) + upstream,
            traffic=2,
            more_bytes=bytes_in(trainable),
            operators=2,
        )
        result.backward.append(backward)
        input_grad = seconds(counter.work) if upstream else 0.0
        result.weight_grad.append(max(0.0, backward - input_grad) if trainable else 0.0)

    def _unknown(
        self, node: fx.Node, parameters: list[nn.Parameter], buffers: list[torch.Tensor]
    ) -> None:
        self._missing.add(node)
        result = self._result
        result.unknown.append(node.name)
        result.draws.append(ANY_DRAWS)
        result.writes.append(frozenset())
        result.written_buffers.update(self._buffer_names[id(item)] for item in buffers)
        flops = 2 * self._positions * sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype if parameters else torch.float32
        forward = self._figures.seconds([Work(flops, dtype, 0)])
        result.forward.append(forward)
        result.backward.append(2 * forward)
        result.weight_grad.append(forward if parameters else 0.0)
        self._saved.end_part()
        result.saved_bytes.append(0)

    def _record(self, node: fx.Node, value: Any) -> None:
        self._kept_alive.append(value)  # a storage's number is only unique while it lives
        leaves, tensors = pytree.tree_leaves(value), tensors_in(value)
        if leaves and all(type(item) is int for item in leaves):
            self._result.sizes.add(node.name)
        self._result.storages[node.name] = frozenset(map(storage_of, tensors))
        self._result.described[node.name] = _described(value)
        self._result.value_bytes[node.name] = bytes_in(tensors)
        self._result.crossing[node.name] = sum(map(_crossing, tensors))

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


def _stale_reads(layers: list[fx.Node], costs: LayerCosts) -> Iterable[tuple[int, int, str]]:
    """Yields what holds layers together because a value is read after a write to its memory.

    Gives the layer that makes the value, the last one that reads it, and a name for it: values from
    before the write, read after it.
    """
    index_of = {node: index for index, node in enumerate(layers)}
    for writer, storages in enumerate(costs.writes):
        for storage in storages:
            # The values of that memory from before the write, with the layers that make them.
            older = {
                node: index_of.get(node, 0)
                for layer in layers
                for node in layer.all_input_nodes
                if storage in costs.storages.get(node.name, ()) and index_of.get(node, 0) < writer
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
                yield first, max([writer, *readers]), next(iter(older)).name


def _num_drawn() -> int:
    place = _C.random_place()
    assert place is not None
    return place[1]


def _positions(item: torch.Tensor) -> int:
    features = item.shape[-1] if item.is_floating_point() and item.dim() > 1 else 1
    return item.numel() // max(features, 1)


def _crossing(item: torch.Tensor) -> float:
    directions = 2 if item.requires_grad else 1
    # A tensor that is not contiguous is copied before it is sent.
    copies = 1 if item.is_contiguous() else 2
    seconds = bytes_in(item) * copies / _LINK_BYTES_PER_SECOND
    return directions * (seconds + copies * _LINK_SECONDS_PER_TENSOR)


def _described(value: Any) -> str:
    """Describes structure, shapes, strides, dtypes and whether gradients are required."""
    leaves, structure = pytree.tree_flatten(value)
    parts = (
        f"{list(item.shape)} {list(item.stride())} {item.dtype} {item.requires_grad}"
        if isinstance(item, torch.Tensor)
        else repr(item)
        for item in leaves
    )
    return f"{'; '.join(parts)}; {structure if len(leaves) > 1 else ''}"
