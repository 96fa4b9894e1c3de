"""Trains for long, or builds pipelines over and over, and fails if the process grows.

    python -m tests.soak                    10^5 batches, with evaluations, flushes and state_dicts
    python -m tests.soak --ranks 2 --batches 20000     in two processes
    python -m tests.soak --cycles 100       pipelines that end in every way, one after the other
    python -m tests.soak --cycles 100 --ranks 2 --transport gloo

Threads, descriptors, memory files and groups must not grow at all once the first tenth is over, and
resident memory by no more than --growth MiB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.building_again import ENDS, each_round
from tests.runs.launch import run_ranks
from tests.runs.resources import Resources, resources
from tests.runs.transports import SHARED_MEMORY, TRANSPORTS, over

REPORTS = 20


def trained(batches: int) -> Iterator[Resources]:
    """What the process holds, at equal distances in so many batches."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 16)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(2)]
    with pd2.PipelineModule(layers, mse_loss, num_microbatches=2, example_args=(x[:1],)) as pipe:
        optimizer = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=1e-3), max_grad_norm=1.0
        )
        loss = None
        for batch in range(batches):
            if loss is not None:
                float(loss)
            loss = pipe.train_step(x[: 4 + batch % 5], target=y[: 4 + batch % 5])
            optimizer.step()
            if batch % 300 == 299:
                pipe.flush()
            if batch % 500 == 499:
                pipe.eval()
                pipe(x)
                pipe.train()
            if batch % 1000 == 999:
                pipe.full_state_dict()
                optimizer.state_dict()
            if (batch + 1) % max(1, batches // REPORTS) == 0:
                yield resources()


def seen(rank: int, world: int, batches: int, cycles: int) -> list[tuple[float, Resources]]:
    """The same for both, with the seconds since the start."""
    start = time.monotonic()
    rounds = -(-cycles // len(ENDS))
    found = []
    for each in each_round(rank, rounds) if cycles else trained(batches):
        found.append((time.monotonic() - start, each))
        print(f"{found[-1][0]:8.1f} s  {each}", flush=True)
    return found


def grows(found: list[Resources], most: float) -> str:
    """What grows after the first tenth, "" if nothing does."""
    first, *others = found[-(-len(found) // 10) :]
    for each in others:
        if any(now > then for now, then in zip(each.counts(), first.counts(), strict=True)):
            return f"{first} -> {each}"
    growth = (found[-1].resident - first.resident) / 2**20
    return f"resident memory: {growth:+.1f} MiB" if growth > most else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=0, help="pipelines to build instead")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="1: threads")
    parser.add_argument("--transport", choices=TRANSPORTS, default=SHARED_MEMORY)
    parser.add_argument("--growth", type=float, default=8.0, help="MiB of memory")
    options = parser.parse_args()
    results = run_ranks(
        over,
        options.ranks,
        args=(options.transport, seen, options.batches, options.cycles),
        rendezvous="environment" if options.ranks > 1 else "none",
        timeout=86400.0,
    )
    wrong = False
    for result in results:
        found = grows([each for _, each in result.value], options.growth)
        wrong |= bool(found)
        print(f"--- rank {result.rank}: {found or 'nothing grows'}\n{result.stdout}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
