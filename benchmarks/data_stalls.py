"""What data_stalls() finds and predicts, over what is known, of loaders whose costs are known.

    python benchmarks/data_stalls.py [--rounds 5] [--smoke] [--json PATH]

Rows take some time to prepare, and some to fetch the first time. One worker loads them for two
stages in threads. Predicted are more workers, a cache of half the rows, and both; then loaders with
these feed the same pipeline. Rows sleep, so two cores are enough, but others' work on them shows.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from measuring.report import Figure, arguments, describe, machine, report_ratios
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pipedream2bw as pd2

WIDTH, ROWS, BATCH = 8, 4000, 4
NEAR = {"at_least": 0.9, "at_most": 1.1}
CHANGED = {
    "2 times the workers": (2, 0.0),
    "half of the rows cached": (1, 0.5),
    "2 times the workers, half of the rows cached": (2, 0.5),
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a batch."""

    fetching: float
    preparing: float
    computing: float


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of known costs, of which a share has been fetched before."""

    def __init__(self, costs: Costs, cached: float) -> None:
        self.costs = costs
        self.in_memory = torch.zeros(ROWS, dtype=torch.bool).share_memory_()
        self.in_memory[torch.randperm(ROWS)[: int(cached * ROWS)]] = True

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        fetching = 0.0 if self.in_memory[row] else self.costs.fetching
        time.sleep((fetching + self.costs.preparing) / BATCH)
        self.in_memory[row] = True
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


class Slow(nn.Linear):
    """A stage that takes some time, of which forwards are all."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def found(costs: Costs, batches: int, workers: int = 1, cached: float = 0.0) -> pd2.DataStalls:
    loader = DataLoader(Rows(costs, cached), BATCH, shuffle=True, num_workers=workers)
    with pd2.PipelineModule(
        [Slow(costs.computing / 2), Slow(costs.computing / 2)],
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.zeros(BATCH, WIDTH),),
    ) as pipe:
        return pd2.data_stalls(loader, pipe, batches)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    rounds, batches = (1, 2) if options.smoke else (options.rounds, 24)
    scale = 0.1 if options.smoke else 1.0
    costs = Costs(0.060 * scale, 0.060 * scale, 0.010 * scale)
    where = machine()
    print(describe(where), flush=True)
    ratios: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}

    def add(name: str, mine: float, truth: float) -> None:
        ratios.setdefault(name, []).append(mine / truth)
        times.setdefault(f"{name}: truth, ms a batch", []).append(1e3 * truth)

    for seed in range(rounds):  # by chance a batch has more or fewer of the rows that are cached
        torch.manual_seed(seed)
        stalls = found(costs, batches)
        add("rows read before, alone", stalls.preparing, costs.preparing)
        add("rows as they are, alone", stalls.loading, costs.fetching + costs.preparing)
        add("stall for fetching", stalls.fetch_stall, costs.fetching)
        waited = costs.preparing - stalls.synthetic
        add("stall for preparing", stalls.preparation_stall, waited)
        for name, (factor, cached) in CHANGED.items():
            truth = found(costs, batches, factor, cached).as_is
            add(name, stalls.with_workers(factor, cached), truth)
    setting = f"fetching {1e3 * costs.fetching:g} ms, preparing {1e3 * costs.preparing:g}"
    figures = [Figure(setting, name, values, **NEAR) for name, values in ratios.items()]
    each = [Figure(setting, name, values) for name, values in times.items()]
    report_ratios(options, where, figures, each, rounds=rounds)


if __name__ == "__main__":
    main()
