"""The tables of the documents, from a JSON of results."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

NOT_MEASURED = "not measured"

Found = list[dict[str, Any]]
"""Rows of the JSON."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a line of the table says.

    Attributes:
        row: matches the names of the section's rows, and nothing beside.
        shown: makes the text of one value, or of a row's detail if that has none.
    """

    what: str
    goal: str
    section: str
    row: str
    shown: Callable[[float], str] = "{:.3f}".format

    def measured(self, rows: Found) -> str:
        """Least and greatest of several rows; what misses the goal says so."""
        found = [row for row in rows if re.fullmatch(self.row, row["name"])]
        values = [row["value"] for row in found if row["value"] is not None]
        if values:
            ends = dict.fromkeys(self.shown(value) for value in (min(values), max(values)))
            text = " to ".join(ends)
        else:
            told = [row["detail"].splitlines()[0] for row in found if row["detail"]]
            text = ", ".join(dict.fromkeys(told)) if _are_answers(found) else ""
        missed = any(row["status"] == "FAIL" for row in found)
        return (text or NOT_MEASURED) + " (missed)" * (missed and bool(text))


def _are_answers(rows: Found) -> bool:
    return bool(rows) and all(row["status"] in ("pass", "FAIL", "noted") for row in rows)


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs"


def whole(value: float) -> str:
    return f"{value:,.0f}"


GOALS = (
    Goal(
        "a fused optimizer step / a copy of as many bytes, rate",
        "≥ 0.9",
        "bandwidth",
        r".*: bandwidth / a copy's",
    ),
    Goal(
        "a step over 200 runs of parameters / over one, time",
        "≤ 1.1",
        "bandwidth",
        r".*: 200 runs / one",
    ),
    Goal(
        "d = 1 / the unsplit model with accumulated gradients, time",
        "≤ 1.03",
        "one stage",
        r"d = 1 / unsplit",
    ),
    Goal("clipping by norm / none, time", "≤ 1.02", "one stage", r"clipping / none"),
    Goal(
        "launching a microbatch of six blocks, with CUDA graphs",
        "≤ 30 µs",
        "one stage",
        r"with graphs: launching .*",
        microseconds,
    ),
    Goal("the same without", "", "one stage", r"without graphs: launching .*", microseconds),
    Goal("the caller's waits for the device", "0", "waits", r".*: the caller's waits"),
    Goal("the allocator's peak / `memory_report()`", "≤ 1.05", "memory", r".*: peak / report"),
    Goal(
        "two processes by shared memory of the device, distance from the unsplit model",
        "≤ 1e-6",
        "ring",
        r"the device's shared memory: as the unsplit model",
    ),
    Goal(
        "three and four processes, the same",
        "≤ 1e-6",
        "chains",
        r"\d processes, [^:]*",
    ),
    Goal(
        "streams behind one that waits, of 63",
        "",
        "streams",
        r"CUDA_DEVICE_MAX_CONNECTIONS unset: .*",
        whole,
    ),
    Goal(
        "the same with `CUDA_DEVICE_MAX_CONNECTIONS=32`",
        "",
        "streams",
        r"CUDA_DEVICE_MAX_CONNECTIONS = 32: .*",
        whole,
    ),
)

TRAININGS = (
    ("tokens/s", whole),
    ("tokens/s / unsplit's", "{:.2f}".format),
    ("memory, GiB", "{:.1f}".format),
    ("loss of step 1", "{:.3f}".format),
    ("loss of step 50", "{:.3f}".format),
    ("loss of step 100", "{:.3f}".format),
)
"""The columns of the section "train", by the ends of its rows' names."""


def tables(path: Path) -> str:
    """The markdown of the README and of docs/gpu.md, from what a check has written to ``path``."""
    results = json.loads(path.read_text(encoding="utf-8"))
    sections: dict[str, Found] = {each["name"]: each["rows"] for each in results["sections"]}
    where = f"{results['device']}, torch {results['torch']}"
    goals = [
        (goal.what, goal.goal, goal.measured(sections.get(goal.section, []))) for goal in GOALS
    ]
    parts = [_table(("what", "goal", f"measured on {where}"), goals)]
    trainings = _trainings(sections.get("train", []))
    parts.append(_table(("training", *(column for column, _ in TRAININGS)), trainings))
    failed = [each["name"] for each in results["sections"] if each["status"] == "FAIL"]
    parts.append(f"Failed: {', '.join(failed) or 'nothing'}.")
    return "\n\n".join(parts)


def _trainings(rows: Found) -> list[tuple[str, ...]]:
    """A line for each training of which anything was said."""
    values = {row["name"]: row["value"] for row in rows}
    names = dict.fromkeys(
        name.removesuffix(f": {TRAININGS[0][0]}")
        for name in values
        if name.endswith(f": {TRAININGS[0][0]}")
    )
    lines = []
    for name in names:
        found = [(values.get(f"{name}: {column}"), shown) for column, shown in TRAININGS]
        cells = [NOT_MEASURED if value is None else shown(value) for value, shown in found]
        lines.append((name, *cells))
    return lines or [(NOT_MEASURED,) * (len(TRAININGS) + 1)]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)
