"""The paper's figures from shapes, makers' figures and two constants, beside what it reports.

The constants are fitted on one row (GPT 2.2B on 8 devices, B = 64, five systems) and used on all
others. Nothing is measured here: what is assumed stands in benchmarks/README.md.

    python benchmarks/paper/reproduce.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measuring.report import Figure, arguments, machine, print_table, write_json
from benchmarks.paper import figures, systems, zero_bubble
from benchmarks.paper.devices import P3_16XLARGE, Cluster, Constants
from benchmarks.paper.shapes import GPT_1_3B, GPT_28_3B
from benchmarks.paper.systems import Setting

TOLERANCE = 0.10
CHOICES = "2bw by (d, b), sequences/s"
START = {"efficiency": (0.3, 0.9), "launch": (0.0, 2e-3)}  # where the constants are looked for


@dataclasses.dataclass(frozen=True)
class Row:
    """One of the paper's numbers."""

    table: str
    name: str
    paper: float
    ours: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        return self.ours / self.paper - 1


def misfit(bars: figures.Bars, cluster: Cluster, constants: Constants) -> float:
    """Squared logarithms of ours over the paper's, over the row's five systems."""
    total = 0.0
    for system, reported in bars.by_system().items():
        ours = systems.sequences_per_second(bars.setting(figures.ROWS), system, cluster, constants)
        total += math.inf if ours is None else math.log(ours / reported) ** 2
    return total


def fit(bars: figures.Bars, cluster: Cluster, *, zooms: int = 6, points: int = 7) -> Constants:
    """Least squares, on a grid that is laid closer around its best point every time."""
    ranges = dict(START)
    best = Constants(0.5, 0.0)
    for _ in range(zooms):
        grid = [
            [low + (high - low) * i / (points - 1) for i in range(points)]
            for low, high in ranges.values()
        ]
        best = min(
            itertools.starmap(Constants, itertools.product(*grid)),
            key=lambda constants: misfit(bars, cluster, constants),
        )
        for name, (low, high) in ranges.items():
            reach = (high - low) / (points - 1)
            at = getattr(best, name)
            ranges[name] = (max(START[name][0], at - reach), min(START[name][1], at + reach))
    return best


def throughput_rows(cluster: Cluster, constants: Constants) -> list[Row]:
    rows = []
    for bars in figures.THROUGHPUT:
        for system, reported in bars.by_system().items():
            setting = bars.setting(figures.ROWS)
            ours = systems.sequences_per_second(setting, system, cluster, constants)
            rows.append(
                Row(
                    "sequences/s",
                    f"{bars.label}: {system}",
                    reported,
                    ours or 0.0,
                    is_fitted=bars is figures.THROUGHPUT[0],
                )
            )
    return rows


def memory_rows() -> list[Row]:
    setting = figures.THROUGHPUT[0].setting(figures.ROWS)
    return [
        Row("GB", f"{setting.model.name}: {system}", gb, systems.peak_bytes(setting, system) / 1e9)
        for system, gb in figures.MEMORY.items()
    ]


def largest_model(depth: int, cluster: Cluster, devices: int = 64) -> int:
    """Parameters of the deepest model that 2BW trains, with microbatches of one sequence."""

    def setting(layers: int) -> Setting:
        model = dataclasses.replace(GPT_28_3B, layers=layers)
        return Setting(model, devices, depth, rows=1, batch=devices)

    layers = depth
    while systems.peak_bytes(setting(layers + depth), "2bw") <= cluster.memory:
        layers += depth
    return setting(layers).model.parameters


def largest_rows(cluster: Cluster) -> list[Row]:
    return [
        Row("largest model, 1e9", f"d={depth}", billions, largest_model(depth, cluster) / 1e9)
        for depth, billions in figures.LARGEST.items()
    ]


def choice_label(setting: Setting) -> str:
    return f"{setting.model.name}, B={setting.batch}: d={setting.depth}, b={setting.rows}"


def choice_rows(cluster: Cluster, constants: Constants) -> list[Row]:
    rows = []
    for setting, reported in figures.CHOICES:
        ours = systems.sequences_per_second(setting, "2bw", cluster, constants)
        rows.append(Row(CHOICES, choice_label(setting), reported, ours or 0.0))
    return rows


def best_choice(batch: int, cluster: Cluster, constants: Constants) -> tuple[Setting, float]:
    """Over all depths and microbatches that fit the memory and that 2BW can run."""
    best: tuple[Setting, float] | None = None
    for depth, rows in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        setting = Setting(GPT_1_3B, 64, depth, rows, batch)
        if setting.microbatches < depth:
            continue
        ours = systems.sequences_per_second(setting, "2bw", cluster, constants)
        if ours is not None and (best is None or ours > best[1]):
            best = setting, ours
    if best is None:
        raise ValueError(f"batch: {batch}, devices: 64: no depth and microbatch fit")
    return best


def zero_bubble_rows(constants: Constants) -> list[Row]:
    rows = []
    for (name, stages_per_rank), (samples, gb) in figures.ZERO_BUBBLE.items():
        simulation = zero_bubble.simulate(name, stages_per_rank, constants)
        ours = zero_bubble.samples_per_device(simulation)
        rows.append(Row("samples/device/s", f"GPT 6.2B, A100: {name}", samples, ours))
        peak = max(simulation.peak_bytes) / 1e9
        rows.append(Row("GB, A100", f"GPT 6.2B, A100: {name}", gb, peak))
    for microbatches, (two_versions, flushed) in figures.A800.items():
        ours = zero_bubble.flush_over_2bw(8, microbatches)
        name = f"GPT 1.56B, 8 A800, m={microbatches}"
        rows.append(Row("1f1b over 2bw", name, flushed / two_versions, ours))
    return rows


def wrong_orders(rows: list[Row]) -> list[str]:
    """Pairs of one setting's rows whose order is not the paper's."""
    wrong = []
    of_setting: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        setting = row.name.rpartition(": ")[0]
        of_setting.setdefault((row.table, setting), []).append(row)
    for (table, _), group in of_setting.items():
        for one, other in itertools.combinations(group, 2):
            if (one.paper - other.paper) * (one.ours - other.ours) < 0:
                wrong.append(f"{table}: {one.name} and {other.name}")
    return wrong


def summary(rows: list[Row], gpipe_fits: bool) -> list[Figure]:
    """Errors of the rows that were not fitted, and what is not as in the paper."""
    tested = [row for row in rows if not row.is_fitted]
    what = "median error of the rows not fitted"
    result = [
        Figure(table, what, [abs(row.error) for row in tested if row.table == table])
        for table in dict.fromkeys(row.table for row in tested)
    ]
    result.append(Figure("all", what, [abs(row.error) for row in tested], at_most=TOLERANCE))
    wrong = wrong_orders([row for row in rows if row.table != CHOICES])
    result.append(Figure("all", "systems in another order", [float(len(wrong))], at_most=0))
    wrong = wrong_orders([row for row in rows if row.table == CHOICES])
    result.append(Figure(CHOICES, "settings in another order", [float(len(wrong))]))
    result.append(Figure("GB", "GPipe fits (the paper: no)", [float(gpipe_fits)], at_most=0))
    return result


def print_rows(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    for table in dict.fromkeys(row.table for row in rows):
        print(f"\n{table:{width}}{'paper':>10}{'ours':>10}{'error':>9}")
        for row in rows:
            if row.table == table:
                note = "  fitted" if row.is_fitted else ""
                line = f"{row.name:{width}}{row.paper:10.4g}{row.ours:10.4g}"
                print(f"{line}{100 * row.error:+8.1f}%{note}")
    print()


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=None).parse_args()
    cluster = P3_16XLARGE
    zooms = 1 if options.smoke else 6
    constants = fit(figures.THROUGHPUT[0], cluster, zooms=zooms)
    print(
        f"fitted on {figures.THROUGHPUT[0].label}: {constants.efficiency:.3f} of the peak, "
        f"{1e3 * constants.launch:.3f} ms a pass of a block"
    )
    rows = throughput_rows(cluster, constants) + memory_rows() + choice_rows(cluster, constants)
    rows += zero_bubble_rows(constants)
    if not options.smoke:
        rows += largest_rows(cluster)
    print_rows(rows)
    chosen = {batch: best_choice(batch, cluster, constants) for batch in (64, 256, 512, 2048)}
    for batch, (setting, rate) in chosen.items():
        print(f"best of all d, b at B={batch}: {choice_label(setting)}, {rate:.0f} sequences/s")
    for pair in wrong_orders(rows):
        print(f"another order: {pair}")
    gpipe = figures.THROUGHPUT[0].setting(figures.ROWS)
    gpipe_fits = systems.peak_bytes(gpipe, "gpipe") <= cluster.memory
    results = summary(rows, gpipe_fits)
    print_table(results, judged=not options.smoke)
    write_json(
        options.json,
        machine(),
        results,
        constants=dataclasses.asdict(constants),
        rows=[dataclasses.asdict(row) | {"error": row.error} for row in rows],
        best_choices={batch: [s.depth, s.rows, rate] for batch, (s, rate) in chosen.items()},
        smoke=options.smoke,
    )


if __name__ == "__main__":
    main()
