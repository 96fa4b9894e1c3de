"""What the outer optimizer makes of sites that talk often and seldom: held-out accuracy.

Two sites train scikit-learn's digits as a pipeline of two stages under 2bw, SGD with momentum, and
exchange every H batches. The rows of a site are drawn from all classes (unskewed), or from five of
the ten (skewed). ``average`` is ReplicaSync's default, ``Nesterov`` DiLoCo's outer optimizer. The
accuracy is that of the anchors on held-out rows of all classes; SkewScout chooses H among the rest.

    python benchmarks/replica_sync.py [--rounds 3] [--smoke] [--json PATH]

A round is a seed of the initial weights and the batches.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring.ranks import run_with_store
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from sklearn.datasets import load_digits
from torch import nn

import pipedream2bw as pd2

SITES = 2
ROWS = 32  # of a site's batch
NUM_HELD_OUT = 360
BATCHES, MEASURED_EVERY = 594, 99  # so that a measurement comes late in each round
INTERVALS = (1, 5, 20, 99)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OUTER: dict[str, dict[str, Any]] = {"average": {}, "Nesterov": {"outer": NESTEROV}}
LEAST_ACCURACY = 0.9
"""Of the default where sites talk every 5 batches, and where SkewScout chooses."""


def rows_of(site: int | None, skewed: bool, *, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 64] and labels [n] of a site, or of all."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    order = order[:NUM_HELD_OUT] if held_out else order[NUM_HELD_OUT:]
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    if site is not None:
        place = labels * SITES // 10 if skewed else torch.arange(len(labels)) % SITES
        images, labels = images[place == site], labels[place == site]
    return images, labels


def batches_of(
    site: int, skewed: bool, seed: int, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = rows_of(site, skewed, held_out=False)
    generator = torch.Generator().manual_seed(1000 * seed + site)
    for _ in range(count):
        chosen = torch.randint(len(labels), (ROWS,), generator=generator)
        yield images[chosen], labels[chosen]


def stages() -> list[nn.Module]:
    first = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
    return [first, nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))]


def accuracy(pipe: pd2.PipelineModule, images: torch.Tensor, labels: torch.Tensor) -> float:
    pipe.eval()
    output = pipe(images)
    pipe.train()
    return float((output.argmax(1) == labels).double().mean())


def train(
    site: int, store: dist.Store, every: Any, outer: str, skewed: bool, seed: int, batches: int
) -> tuple[float, int]:
    """The anchors' accuracy at the end, and H then."""
    torch.manual_seed(seed)
    at_home = rows_of(site, skewed, held_out=True)
    with pd2.PipelineModule(
        stages(),
        nn.functional.cross_entropy,
        num_microbatches=2,
        example_args=(torch.zeros(2, 64),),
        timeout=60,
    ) as pipe:
        sync = pd2.ReplicaSync(every, store=store, site=site, num_sites=SITES, **OUTER[outer])
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        opt = pd2.PipelineOptimizer(sgd, replica_sync=sync)
        for t, (x, y) in enumerate(batches_of(site, skewed, seed, batches)):
            pipe.train_step(x, target=y)
            opt.step()
            if isinstance(every, pd2.SkewScout) and (t + 1) % MEASURED_EVERY == 0:
                sync.measure(lambda: accuracy(pipe, *at_home))
        with sync.evaluating_anchors():
            return accuracy(pipe, *rows_of(None, skewed, held_out=True)), sync.every


def measure(site: int, store: dist.Store, path: str, seeds: int, smoke: bool) -> None:
    """A site's process; the first one writes the figures' values."""
    torch.set_num_threads(1)
    intervals = INTERVALS[1:2] if smoke else INTERVALS
    ways = [(f"H = {every}", every) for every in intervals]
    ways.append(("SkewScout", pd2.SkewScout(INTERVALS[1:], threshold=0.02)))
    found = {}
    for skewed in (False, True):
        for name, every in ways:
            for outer in OUTER:
                key = "skewed" if skewed else "unskewed", f"{name}, {outer}"
                found[key] = [
                    train(
                        site,
                        dist.PrefixStore(f"{key} {seed}", store),
                        every,
                        outer,
                        skewed,
                        seed,
                        6 if smoke else BATCHES,
                    )
                    for seed in range(seeds)
                ]
    if site == 0:
        torch.save(found, path)


def figures_of(found: dict[tuple[str, str], list[tuple[float, int]]]) -> list[Figure]:
    figures = []
    for (setting, way), values in found.items():
        judged = way in ("H = 5, average", "SkewScout, average")
        accuracies = [accuracy for accuracy, _ in values]
        least = LEAST_ACCURACY if judged else None
        figures.append(Figure(setting, way, accuracies, at_least=least))
        if way.startswith("SkewScout"):
            figures.append(Figure(setting, f"{way}: last H", [float(every) for _, every in values]))
    return figures


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=3).parse_args()
    where = machine()
    print(describe(where))
    seeds = 1 if options.smoke else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "found"))
        method = "fork" if options.smoke else "spawn"
        run_with_store(method, SITES, measure, path, seeds, options.smoke)
        figures = figures_of(torch.load(path))
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures, rounds=seeds, smoke=options.smoke)


if __name__ == "__main__":
    main()
