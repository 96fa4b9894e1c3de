"""How many floating-point operations one call of an operator does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


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
