"""What it costs to notice changes of a model: step times with the comparison and without it.

Two stage threads, layers of almost no work, 1f1b with m = 4, of 4, 24 and 100 blocks.

    python benchmarks/model_changes.py [--rounds 30] [--smoke] [--json PATH]

Blocks of steps alternate on one pipeline, and so does which of a round's two is first; the figure
is the median of the rounds' ratios.
"""

from __future__ import annotations

import time

import torch
from measuring.report import Figure, arguments, describe, machine, report_ratios
from torch import nn

import pipedream2bw as pd2

NUM_MICROBATCHES = 4
WIDTH, ROWS = 64, 32
MOST_OVERHEAD = 1.01


class Training:
    """A pipeline of small blocks that compares what its code reads, or does not."""

    def __init__(self, num_blocks: int) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)]
        self._x = torch.randn(ROWS, WIDTH)
        self.pipe = pd2.PipelineModule(
            nn.Sequential(*blocks),
            nn.functional.mse_loss,
            num_stages=2,
            num_microbatches=NUM_MICROBATCHES,
            schedule="1f1b",
            example_args=(self._x,),
        )
        self._optimizer = pd2.PipelineOptimizer(torch.optim.SGD(self.pipe.parameters(), lr=0.01))

    def seconds(self, steps: int, *, compares: bool) -> float:
        """Of a step, in a block of these."""
        changes = self.pipe.session.changes
        if not compares:
            changes.look = lambda *, running: None  # type: ignore[method-assign]
        begin = time.perf_counter()
        for _ in range(steps):
            self.pipe.train_step(self._x, target=self._x)
            self._optimizer.step()
        self.pipe.flush()
        taken = time.perf_counter() - begin
        vars(changes).pop("look", None)
        return taken / steps


def measure(num_blocks: int, rounds: int, seconds: float) -> tuple[list[Figure], Figure]:
    """Times with and without the comparison, and the ratios."""
    training = Training(num_blocks)
    steps = max(2, int(seconds / training.seconds(10, compares=True)))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for compares in (False, True) if number % 2 == 0 else (True, False):
            taken[compares].append(training.seconds(steps, compares=compares))
    training.pipe.close()
    setting = f"{num_blocks} blocks"
    times = [
        Figure(setting, f"{name}: ms a step", [1e3 * value for value in taken[compares]])
        for name, compares in (("not compared", False), ("compared", True))
    ]
    ratios = [on / off for off, on in zip(taken[False], taken[True], strict=True)]
    name = "step time compared over not compared"
    return times, Figure(setting, name, ratios, at_most=MOST_OVERHEAD, ideal=1.0)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=30).parse_args()
    rounds, seconds = (2, 0.05) if options.smoke else (options.rounds, 0.5)
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    times: list[Figure] = []
    figures: list[Figure] = []
    for num_blocks in (4, 24, 100):
        its_times, figure = measure(num_blocks, rounds, seconds)
        times += its_times
        figures.append(figure)
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
