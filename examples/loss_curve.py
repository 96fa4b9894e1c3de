"""A picture of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def mean_of_last(losses: Sequence[float]) -> float:
    """The mean of the last 20 losses, or of all if there are fewer."""
    last = losses[-20:]
    return sum(last) / len(last)


def draw_losses(losses: list[float], path: Path, unit: str = "nats per token") -> None:
    """Draws every batch's loss and the mean of the 20 around it."""
    window = max(1, min(20, len(losses) // 4))
    means = [sum(losses[i : i + window]) / window for i in range(max(0, len(losses) - window) + 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=130)
    axes = figure.subplots()
    axes.plot(losses, color="#9ecae1", linewidth=0.8, label="loss of the batch")
    centres = [i + window / 2 for i in range(len(means))]
    axes.plot(centres, means, color="#08519c", linewidth=1.8, label=f"mean of {window} batches")
    axes.set_xlabel("batch")
    axes.set_ylabel(f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
