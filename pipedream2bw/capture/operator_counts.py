"""What operators do while they run, on fake tensors too: arithmetic and memory traffic."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .device_figures import Work


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        flops = 0
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
        elif "scaled_dot_product" in str(packet) and "backward" not in str(packet):
            shapes = (item.shape for item in args[:3])
            flops = int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
        first = next((item for item in args if isinstance(item, torch.Tensor)), None)
        dtype = first.dtype if flops and first is not None else torch.float32
        moved = 0 if func.is_view else bytes_of((args, kwargs, result))
        self.work.append(Work(flops, dtype, moved))
        return result


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in a structure of lists, tuples and dictionaries."""
    return [item for item in pytree.tree_leaves(tree) if isinstance(item, torch.Tensor)]


def bytes_of(tree: Any) -> int:
    """Returns the number of bytes of all tensors in a structure."""
    return sum(item.numel() * item.element_size() for item in tensor_leaves(tree))


def described(value: Any) -> str:
    """Describes structure, shapes, strides, dtypes and whether gradients are required."""
    leaves, structure = pytree.tree_flatten(value)
    parts = (
        f"{list(item.shape)} {list(item.stride())} {item.dtype} {item.requires_grad}"
        if isinstance(item, torch.Tensor)
        else repr(item)
        for item in leaves
    )
    return f"{'; '.join(parts)}; {structure if len(leaves) > 1 else ''}"
