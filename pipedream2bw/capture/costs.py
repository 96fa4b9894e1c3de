"""What the layers of a graph cost, counted during its dry run.

Every rank counts the same, since every rank has to find the same stages. A nominal machine turns
counts of operations and bytes into seconds; only their ratios matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..model.storages import storage_of
from ..model.trees import bytes_in, tensors_in
from .device_figures import NOMINAL, DeviceFigures, Work
from .saved_bytes import SavedBytes

# A nominal link between stages.
_LINK_BYTES_PER_SECOND = 2e9
_LINK_SECONDS_PER_TENSOR = 20e-6


@dataclasses.dataclass(kw_only=True)
class LayerCosts:
    """Costs by layer (in execution order) and by value (node name).

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
    """

    forward: list[float] = dataclasses.field(default_factory=list)
    backward: list[float] = dataclasses.field(default_factory=list)
    weight_grad: list[float] = dataclasses.field(default_factory=list)
    saved_bytes: list[int] = dataclasses.field(default_factory=list)
    kept: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    described: dict[str, str] = dataclasses.field(default_factory=dict)
    value_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    crossing: dict[str, float] = dataclasses.field(default_factory=dict)


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


class CostCounter:
    """Counts the costs of one dry run.

    Args:
        figures: turn operations and bytes into seconds.
        count_saved: fills ``saved_bytes``; fewer operators run then, because autograd makes no
            views.
    """

    def __init__(self, figures: DeviceFigures = NOMINAL, *, count_saved: bool = False) -> None:
        self._figures = figures
        self._count_saved = count_saved
        self._result = LayerCosts()

    def begin(self, state: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]) -> None:
        """Begins a run over these parameters and buffers, with these arguments."""
        # For layers that cannot be counted: they multiply each parameter once for each position.
        self._positions = max((_positions(item) for item in examples), default=1)
        self._saved = SavedBytes(map(storage_of, (*state, *examples)))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, a layer runs."""
        self._operators = _OperatorCounter(free_ones_too=self._figures.free_ones_too)
        with self._operators, self._saved if self._count_saved else contextlib.nullcontext():
            yield

    def count_layer(
        self, parameters: Sequence[nn.Parameter], inputs: Sequence[torch.Tensor], value: Any
    ) -> None:
        """Takes the costs of the layer that has run."""
        result, seconds, work = self._result, self._figures.seconds, self._operators.work
        result.saved_bytes.append(self._saved.end_part())
        result.forward.append(seconds(work))
        if not any(item.requires_grad for item in tensors_in(value)):
            result.backward.append(0.0)
            result.weight_grad.append(0.0)
            return
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        held = {id(parameter) for parameter in parameters}
        upstream = any(item.requires_grad for item in inputs if id(item) not in held)
        backward = seconds(
            work,
            arithmetic=bool(trainable) + upstream,
            traffic=2,
            more_bytes=bytes_in(trainable),
            operators=2,
        )
        result.backward.append(backward)
        input_grad = seconds(work) if upstream else 0.0
        result.weight_grad.append(max(0.0, backward - input_grad) if trainable else 0.0)

    def guess_layer(self, parameters: Sequence[nn.Parameter]) -> None:
        """Takes costs in proportion to the parameters, of a layer that fake tensors cannot run."""
        result = self._result
        flops = 2 * self._positions * sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype if parameters else torch.float32
        forward = self._figures.seconds([Work(flops, dtype, 0)])
        result.forward.append(forward)
        result.backward.append(2 * forward)
        result.weight_grad.append(forward if parameters else 0.0)
        self._saved.end_part()
        result.saved_bytes.append(0)

    def count_value(self, name: str, value: Any) -> None:
        """Takes the sizes of a value that the graph's node of that name has made."""
        tensors = tensors_in(value)
        self._result.described[name] = _described(value)
        self._result.value_bytes[name] = bytes_in(tensors)
        self._result.crossing[name] = sum(map(_crossing, tensors))

    def end(self) -> LayerCosts:
        """Ends the run; gives its costs."""
        self._result.kept = self._saved.saved_by_several()
        return self._result


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


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns what torch's flop counter counts: products of matrices, convolutions, attention.

    A multiply-add is two operations; all else counts none.
    """
    packet = func._overloadpacket
    count = flop_registry.get(packet)
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    if "scaled_dot_product" not in str(packet):
        return 0
    if "backward" in str(packet):  # of the gradient and the three
        shapes = [item.shape for item in args[:4]]
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    shapes = [item.shape for item in args[:3]]
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
