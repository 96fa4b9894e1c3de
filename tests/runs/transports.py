"""How processes agree: through shared memory, as between machines, or on two that are pretended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipedream2bw import _C
from pipedream2bw.ranks import boards

SHARED_MEMORY = "shared memory"
GLOO = "gloo"
TWO_MACHINES = "two machines"
TRANSPORTS = (SHARED_MEMORY, GLOO, TWO_MACHINES)
OF_TWO_RANKS = (SHARED_MEMORY, GLOO)
"""The others are one of these with two ranks."""


def over(rank: int, world: int, transport: str, run: Callable[..., Any], *args: Any) -> Any:
    """``run(rank, world, *args)``; for ``run_ranks``."""
    if transport == GLOO:
        _C.SharedBoard.create = staticmethod(lambda *args: None)  # type: ignore[method-assign]
    if transport == TWO_MACHINES:
        be_on_machine(rank % 2)
    return run(rank, world, *args)


def be_on_machine(number: int) -> None:
    """This process shares memory with those alone that say the same number."""
    boards.machine_id = lambda: f"machine {number}"
