"""Joins the processes that were started together, also where a launcher starts them again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .deadline import Deadline
from .groups import check_built

_LOOK_SECONDS = 0.01
_MOST_LOOK_SECONDS = 0.2


def join_world(device_type: str, deadline: Deadline) -> int:
    """The number of processes; makes the process group where torchrun's environment is alone."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        check_built(device_type, dist.is_nccl_available())
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        deadline.wait("joining all ranks", lambda: _join(backend, deadline.seconds))
    return dist.get_world_size() if dist.is_initialized() else 1


def _join(backend: str, seconds: float) -> None:
    store, rank, world = next(rendezvous("env://"))
    store = store_of_this_life(store, rank, world, seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def store_of_this_life(
    store: Store, rank: int, world: int, seconds: float, *, called: str = "rank"
) -> Store:
    """A part of the store that these processes alone use. Every process calls it.

    torchrun gives the processes that it starts again the store of those before, with their
    addresses and failures. It gives no number of the start that is equal on all machines. So each
    process says a word of its own, and rank 0 answers that word with the name of the part. Whoever
    has the answer tells it there. Words of earlier processes are answered, too, and nobody comes.

    Args:
        called: what a rank is called in errors.

    Raises:
        RuntimeError: a process did not come within ``seconds``.
    """
    last = time.monotonic() + seconds
    word = secrets.token_hex(8)

    def part(name: str) -> Store:
        return PrefixStore(f"pipedream2bw/life/{name}", store)

    def until(is_done: Callable[[], bool], others: Callable[[], str]) -> None:
        pause = _LOOK_SECONDS
        while not is_done():
            if time.monotonic() > last:
                raise RuntimeError(f"{called} {others()} did not come within {seconds:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, _MOST_LOOK_SECONDS)

    said, answers = part("said"), part("answers")
    if rank != 0:
        said.set(str(rank), word)
        until(lambda: answers.check([word]), lambda: "0")
        own = part(answers.get(word).decode())
        own.set(str(rank), "")
        return own
    own = part(word)
    missing = [str(other) for other in range(1, world)]

    def have_come() -> bool:
        for other in missing:
            if said.check([other]):
                answers.set(said.get(other).decode(), word)
        missing[:] = [other for other in missing if not own.check([other])]
        return not missing

    until(have_come, lambda: ", ".join(missing))
    return own
