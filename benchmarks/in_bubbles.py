"""Time to an equal loss with a preconditioner's work in bubbles, over that with it in the update.

Two processes, each on a core of its own, train the GPT of examples/train_soap.py under 1f1b. Every
few batches SOAP's bases are brought up to date. The losses are the same to the bit either way, so
the ratio of the times of a batch is that of the times to any loss.

    python benchmarks/in_bubbles.py [--rounds 9] [--smoke] [--json PATH]

Both pipelines live in the same processes and train a block of batches in turn. Work that finds no
bubble is done by the update that needs it. So beside others' work on the same cores the ratio is 1.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measuring.ranks import run_on_ranks
from measuring.report import Figure, arguments, describe, machine, report_ratios

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss
from train_soap import Refreshes, Soap

NUM_STAGES, M, CONTEXT, ROWS = 2, 2, 32, 8
EVERY = 5
MOST = 1.0
WAYS = ("bubbles", "update")


class Run:
    """A pipeline and the losses that it had."""

    def __init__(self, way: str, width: int) -> None:
        torch.manual_seed(0)
        model = GPT(num_layers=4, width=width, num_heads=4, context=CONTEXT)
        self.batches = RandomBatches(load_text(None), ROWS, CONTEXT, seed=0)
        self.pipe = pd2.PipelineModule(
            model,
            next_token_loss,
            num_stages=NUM_STAGES,
            num_microbatches=M,
            schedule="1f1b",
            example_args=(next(self.batches)[0],),
        )
        bubbles = pd2.InBubbles(self.pipe) if way == "bubbles" else None
        self.refreshes = Refreshes(bubbles)
        soap = Soap(self.pipe.parameters(), self.refreshes, every=EVERY)
        self.opt = pd2.PipelineOptimizer(soap)
        self.losses: list[float] = []

    def train(self, steps: int) -> float:
        """Milliseconds a batch."""
        dist.barrier()
        start = time.perf_counter()
        losses = []
        for _ in range(steps):
            tokens, target = next(self.batches)
            losses.append(self.pipe.train_step(tokens, target=target))
            self.opt.step()
        self.pipe.flush()
        dist.barrier()
        seconds = time.perf_counter() - start
        self.losses += [float(loss) for loss in losses]
        return 1000 * seconds / steps


def measure(rank: int, world: int, rounds: int, steps: int, width: int) -> dict[str, list[float]]:
    """Runs on each rank; milliseconds a batch of each round, by way."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    runs = {way: Run(way, width) for way in WAYS}
    for run in runs.values():
        run.train(2 * EVERY)
    times = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            times[way].append(runs[way].train(steps))
    with runs["update"].pipe.timeline() as timeline:
        runs["update"].train(3)
    events = timeline.gather()
    slots = pd2.idle_slots(events, events[0].batch + 1) if events else []
    times["idle"] = [1000 * sum(s.end - s.start for s in slots if s.rank == 0)]
    times["work"] = [
        1000 * sum(runs["update"].refreshes.seconds[-len(runs["update"].refreshes.begun) :])
    ]
    for run in runs.values():
        run.pipe.close()
    both = [run.losses[: 2 * EVERY + rounds * steps] for run in runs.values()]
    if both[0] != both[1] or both[0][-1] >= both[0][0]:
        raise ValueError("losses: they must be the same both ways, and fall")
    return times


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=9).parse_args()
    rounds = 1 if options.smoke else options.rounds
    where = machine()
    print(describe(where))
    sizes = (5, 32) if options.smoke else (20, 128)
    times = run_on_ranks(NUM_STAGES, measure, rounds, *sizes)[0]
    ratios = [mine / theirs for mine, theirs in zip(*(times[way] for way in WAYS), strict=True)]
    setting = f"SOAP, d = {NUM_STAGES}, m = {M}"
    figures = [
        Figure(setting, "time to a loss: in bubbles over in the update", ratios, at_most=MOST)
    ]
    names = {
        "idle": "idle on rank 0, ms a batch",
        "work": f"work of rank 0, ms every {EVERY} batches",
    }
    shown = {**{way: f"{way}: ms a batch" for way in WAYS}, **names}
    each = [Figure(setting, shown[name], values) for name, values in times.items()]
    report_ratios(options, where, figures, each, rounds=rounds)


if __name__ == "__main__":
    main()
