"""Tables and JSON of what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Figure:
    """A measured quantity: one value for each round, and limits of their median.

    A figure without ``at_least`` and ``at_most`` is for information.
    """

    setting: str
    measure: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None
    ideal: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the middle half of the values lies; of a single value that value."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def verdict(self) -> str:
        if self.at_least is None and self.at_most is None:
            return ""
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return "pass" if low <= self.median <= high else "MISS"

    @property
    def target(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    def summary(self) -> dict[str, Any]:
        """What a report keeps: median, spread, quartiles, number of values, limits, verdict."""
        limits = {"at_least": self.at_least, "at_most": self.at_most, "ideal": self.ideal}
        return {
            "setting": self.setting,
            "measure": self.measure,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "quartiles": self.quartiles,
            "count": len(self.values),
            **{name: value for name, value in limits.items() if value is not None},
            **({"verdict": self.verdict} if self.verdict else {}),
        }


def print_table(figures: list[Figure], *, judged: bool) -> None:
    """``judged``: with targets and whether they were met."""
    first = max(len(figure.setting) for figure in figures)
    second = max(len(figure.measure) for figure in figures)
    names = "".join(f"{name:>9}" for name in ("median", "q1", "q3", "min", "max"))
    head = f"{'setting':{first}}  {'measure':{second}}{names}{'ideal':>8}"
    print(head + (f"{'target':>14}" if judged else ""))
    for figure in figures:
        columns = (figure.median, *figure.quartiles, min(figure.values), max(figure.values))
        ideal = "" if figure.ideal is None else f"{figure.ideal:.4g}"
        line = f"{figure.setting:{first}}  {figure.measure:{second}}"
        line += "".join(f"{value:9.3f}" for value in columns) + f"{ideal:>8}"
        print(line + (f"{figure.target:>14}  {figure.verdict}" if judged else ""), flush=True)


def machine() -> dict[str, Any]:
    """Where, when and of which commit; how busy the machine was (load of the last minute)."""
    return {
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def describe(where: dict[str, Any]) -> str:
    return (
        f"{where['cpu']}, {where['cores']} cores, load before {where['load']:.1f}; "
        f"torch {where['torch']}, {where['date']}"
    )


def _commit() -> str | None:
    """The commit that is measured, ``-dirty`` with changes; None where there is no repository."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def arguments(description: str, *, rounds: int | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny and quick: no meaningful figures"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    return parser


def add_only(parser: argparse.ArgumentParser, known: Sequence[str]) -> None:
    """``--only``, a list of some of the known names, by default all."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} unknown; known: {', '.join(known)}"
            )
        return names

    parser.add_argument("--only", default=",".join(known), type=chosen, help="names, by comma")


def write_json(
    path: Path | None, where: dict[str, Any], figures: list[Figure], **details: Any
) -> None:
    """Writes all figures, if there is a path, with what is needed to measure them again."""
    if path is None:
        return
    script, *options = sys.argv
    at = options.index("--json") if "--json" in options else len(options)
    del options[at : at + 2]  # where the results went is no part of how they were measured
    report = {
        "command": " ".join(["python", str(Path(script).resolve().relative_to(ROOT)), *options]),
        "machine": where,
        "figures": [figure.summary() for figure in figures],
        **details,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(_rounded(report)))


def report_ratios(
    options: argparse.Namespace,
    where: dict[str, Any],
    figures: list[Figure],
    times: list[Figure],
    *,
    rounds: int,
) -> None:
    """Prints the times and the ratios that are judged, and writes both."""
    print_table(times, judged=False)
    print()
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures + times, rounds=rounds, smoke=options.smoke)


def compact(report: dict[str, Any]) -> str:
    """The report as JSON, with each item of its lists and dictionaries on a line of its own."""
    return (
        "{\n" + ",\n".join(f' "{key}": {_lines(value)}' for key, value in report.items()) + "\n}\n"
    )


def _lines(value: Any) -> str:
    if isinstance(value, list):
        rows, brackets = [json.dumps(item) for item in value], "[]"
    elif isinstance(value, dict) and any(isinstance(item, (dict, list)) for item in value.values()):
        rows = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        brackets = "{}"
    else:
        return json.dumps(value)
    return brackets[0] + "\n  " + ",\n  ".join(rows) + "\n " + brackets[1]


def _rounded(value: Any) -> Any:
    """The value with six significant digits in all floats: no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
