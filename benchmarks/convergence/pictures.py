"""A study's curves: the loss, and how far it is from the first method's run of the same seed.

python benchmarks/convergence/pictures.py RESULTS FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#222222", "#d62728", "#9467bd", "#1f77b4", "#2ca02c", "#ff7f0e")
Runs = dict[str, list[list[float]]]
"""By method: each seed's losses."""


def draw(report: dict[str, Any], folder: Path, name: str = "{}") -> list[Path]:
    """A PNG for each task, named by it: a column for each optimizer and learning rate."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for task in dict.fromkeys(result["task"] for result in report["results"]):
        mine = [result for result in report["results"] if result["task"] == task]
        settings = list(dict.fromkeys((r["optimizer"], r["learning_rate"]) for r in mine))
        figure = Figure(figsize=(max(6, 4 * len(settings)), 7), layout="constrained", dpi=80)
        axes = figure.subplots(2, len(settings), squeeze=False, sharex=True)
        for column, setting in enumerate(settings):
            runs: Runs = {}
            for result in mine:
                if (result["optimizer"], result["learning_rate"]) == setting:
                    losses = [math.nan if x is None else x for x in result["losses"]]
                    runs.setdefault(result["method"], []).append(losses)
            above, below = axes[0][column], axes[1][column]
            above.set_title("{}, learning rate {:g}".format(*setting))
            for each, shown in ((above, runs), (below, from_first(runs))):
                plot(each, shown, report["window"], report.get("at", 0.5))
            below.set_xlabel(report.get("unit", "batch"))
            if task == "digits":
                above.set_yscale("log")
            # Who diverges leaves the picture.
            most = 1.1 * max(of_seed[0] for of_seeds in runs.values() for of_seed in of_seeds)
            for each, shown in ((above, runs), (below, from_first(runs))):
                if each.get_ylim()[1] > most:
                    losses = [x for seeds in shown.values() for seed in seeds for x in seed]
                    least = min(x for x in losses if not math.isnan(x))
                    each.set_ylim(least - 0.05 * most if each is below else 0.9 * least, most)
        axes[0][0].set_ylabel(f"{report.get('measure', 'training loss')} of the {task}")
        axes[1][0].set_ylabel(f"difference from {mine[0]['method']}")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=min(3, 1 + len(settings)),
            frameon=False,
        )
        paths.append(folder / f"{name.format(task.replace(' ', '_'))}.png")
        figure.savefig(paths[-1])
    return paths


def from_first(runs: Runs) -> Runs:
    """Each run less the first method's of the same seed."""
    first = next(iter(runs.values()))
    return {
        method: [
            [mine - its for mine, its in zip(of_seed, reference, strict=True)]
            for of_seed, reference in zip(of_method, first, strict=True)
        ]
        for method, of_method in runs.items()
    }


def plot(axes: Axes, runs: Runs, window: float, at: float) -> None:
    """Means over the seeds, and from their least to their greatest.

    Args:
        at: where in its window a loss belongs: 0 to 1.
    """
    for (method, of_seeds), colour in zip(runs.items(), COLOURS, strict=False):
        by_point = list(zip(*of_seeds, strict=True))
        places = [window * (i + at) for i in range(len(by_point))]
        means = [sum(values) / len(values) for values in by_point]
        axes.plot(places, means, color=colour, linewidth=1.5, label=method)
        low, high = [min(values) for values in by_point], [max(values) for values in by_point]
        axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    results, target = map(Path, sys.argv[1:])
    draw(json.loads(results.read_text()), target)
