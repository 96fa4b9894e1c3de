"""Trains for long, or builds pipelines over and over, and fails if the process grows.

    python -m tests.soak                    10^5 batches, with saves, evaluations and flushes
    python -m tests.soak --ranks 2 --batches 20000     in two processes
    python -m tests.soak --pipelines 10     by ten pipelines, each of which goes on from the last
    python -m tests.soak --cycles 100       pipelines that end in every way, one after the other
    python -m tests.soak --cycles 100 --ranks 2 --transport gloo

Threads, descriptors, memory files and groups must not grow at all once the first tenth is over, and
resident memory by no more than --growth MiB. No more checkpoints may stay than are kept.
"""

from __future__ import annotations

import argparse
import sys

from tests.runs.launch import run_ranks
from tests.runs.resources import Resources
from tests.runs.soaking import soak
from tests.runs.transports import SHARED_MEMORY, TRANSPORTS, over


def grows(found: list[Resources], most: float) -> str:
    """What grows after the first tenth, "" if nothing does."""
    first, *others = found[-(-len(found) // 10) :]
    for each in others:
        if any(now > then for now, then in zip(each.counts(), first.counts(), strict=True)):
            return f"{first} -> {each}"
    growth = (found[-1].resident - first.resident) / 2**20
    return f"resident memory: {growth:+.1f} MiB" if growth > most else ""


def run(
    *,
    batches: int = 100_000,
    pipelines: int = 1,
    cycles: int = 0,
    ranks: int = 1,
    transport: str = SHARED_MEMORY,
    growth: float = 8.0,
    timeout: float = 86400.0,
) -> list[tuple[str, str]]:
    """What grows on each rank, "" if nothing does, and what the rank printed."""
    results = run_ranks(
        over,
        ranks,
        args=(transport, soak, batches, pipelines, cycles),
        rendezvous="environment" if ranks > 1 else "none",
        timeout=timeout,
        # torch keeps its last 2,000 collectives to be looked at, and grows until then.
        env={"TORCH_FR_BUFFER_SIZE": "0"},
    )
    return [(grows([each for _, each in r.value], growth), r.stdout) for r in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--pipelines", type=int, default=1, help="that share the batches")
    parser.add_argument("--cycles", type=int, default=0, help="pipelines to build instead")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="1: threads")
    parser.add_argument("--transport", choices=TRANSPORTS, default=SHARED_MEMORY)
    parser.add_argument("--growth", type=float, default=8.0, help="MiB of memory")
    found = run(**vars(parser.parse_args()))
    for rank, (what, printed) in enumerate(found):
        print(f"--- rank {rank}: {what or 'nothing grows'}\n{printed}")
    return int(any(what for what, _ in found))


if __name__ == "__main__":
    sys.exit(main())
