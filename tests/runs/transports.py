"""How processes agree and pass losses on: through shared memory, or as between machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipedream2bw import _C

SHARED_MEMORY = "shared memory"
GLOO = "gloo"
TRANSPORTS = (SHARED_MEMORY, GLOO)


def over(rank: int, world: int, transport: str, run: Callable[..., Any], *args: Any) -> Any:
    """``run(rank, world, *args)``; for ``run_ranks``."""
    if transport == GLOO:
        _C.SharedBoard.create = staticmethod(lambda *args: None)  # type: ignore[method-assign]
    return run(rank, world, *args)
