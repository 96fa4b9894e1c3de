"""Draws scale.png from benchmarks/results/scale.json: each schedule on 8 to 4,096 devices.

python docs/images/scale.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve()
RESULTS = HERE.parents[2] / "benchmarks" / "results" / "scale.json"
COLOURS = {
    "2bw": "#d62728",
    "2bw_v_two_thirds": "#ff7f0e",
    "2bw_v_half": "#e377c2",
    "1f1b": "#222222",
    "interleaved": "#1f77b4",
    "zero_bubble": "#2ca02c",
    "v_half": "#17becf",
}


def main() -> None:
    """A column for each model: use of the peak above, memory below."""
    report = json.loads(RESULTS.read_text())
    models = [model["name"] for model in report["models"]]
    figure = Figure(figsize=(4 * len(models), 6), layout="constrained", dpi=80)
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        above, below = axes[0][column], axes[1][column]
        for schedule, colour in COLOURS.items():
            mine = [
                row
                for row in report["best"]
                if row["model"] == model and row["schedule"] == schedule
            ]
            devices = [row["devices"] for row in mine]
            style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.5}
            used = [100 * row["utilisation"] for row in mine]
            above.plot(devices, used, label=schedule, **style)
            below.plot(devices, [row["gb"] for row in mine], **style)
        above.set_title(model)
        above.set_ylim(bottom=0)
        below.set_ylim(0, report["cluster"]["memory"] / 1e9)
        below.set_xscale("log", base=2)
        ticks = sorted({row["devices"] for row in report["best"]})
        below.set_xticks(ticks, [str(tick) for tick in ticks], rotation=60)
        below.set_xlabel("devices")
        for each in (above, below):
            each.grid(alpha=0.3)
    axes[0][0].set_ylabel("model operations, % of the peak")
    axes[1][0].set_ylabel("GB on the fullest device")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(HERE.with_suffix(".png"))


if __name__ == "__main__":
    main()
