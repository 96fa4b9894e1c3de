"""Asks a device all that only a device can answer, and prints a table.

    python -m tests.gpu_check [--device cuda] [--json PATH] [--only NAMES] [--seconds 585]

docs/gpu.md says how to run it and how to read it. Needs torch, setuptools, wheel and ninja, and
neither a network nor a virtual environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import building
from .machine import machine
from .running import Outcome, run_section
from .section import Rows, Section, read_rows
from .sections import BUILD, SECTIONS

TOO_LATE = 5.0
"""Seconds: a section that would have fewer is not begun."""


def build(device: str, seconds: float) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "rows"
        built = building.run(device, Rows(path, measures=True), min(BUILD.seconds, seconds))
        rows = read_rows(path)
    failure = "" if built else "nothing else can be asked"
    return Outcome(BUILD.name, BUILD.passes_if, time.monotonic() - start, rows, failure)


def show(outcome: Outcome) -> None:
    """The section's part of the table."""
    print(f"\n{outcome.name:14} {outcome.status:13} {outcome.seconds:5.1f} s   {outcome.passes_if}")
    width = max((len(row.name) for row in outcome.rows), default=0)
    for row in outcome.rows:
        value = "" if row.value is None else f"{row.value:.4g}"
        first, *more = row.detail.splitlines() or [""]
        line = f"    {row.name:{width}}  {row.status:12}  {value:>9} {row.limit:8} {first}"
        print(line.rstrip())
        if row.status == "FAIL":
            print(*(f"        {text}" for text in more), sep="\n")
    if outcome.failure:
        print(f"    FAIL: {outcome.failure}")
        print(outcome.output)
    sys.stdout.flush()


def summary(outcomes: list[Outcome]) -> None:
    print(f"\n{'section':14} {'result':13} {'seconds':>8}   passes if")
    for outcome in outcomes:
        head = f"{outcome.name:14} {outcome.status:13} {outcome.seconds:8.1f}"
        print(f"{head}   {outcome.passes_if}")


def report(path: Path, where: dict[str, Any], outcomes: list[Outcome]) -> None:
    sections = [dataclasses.asdict(each) | {"status": each.status} for each in outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**where, "sections": sections}, indent=1), encoding="utf-8")


def chosen(text: str) -> list[Section]:
    names = [name.strip() for name in text.split(",")]
    known = {section.name: section for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return [known[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "checked"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    parser.add_argument("--only", type=chosen, default=list(SECTIONS), help="names, by comma")
    parser.add_argument("--seconds", type=float, default=585.0, help="for everything (%(default)s)")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    where = machine(options.device)
    print(f"{where['device']}; torch {where['torch']}, Python {where['python']}", flush=True)
    outcomes = [build(options.device, options.seconds)]
    show(outcomes[0])
    for section in options.only:
        left = end - time.monotonic()
        if outcomes[0].failure or left < TOO_LATE:
            why = "not begun: " + (outcomes[0].failure or "no time was left")
            outcomes.append(Outcome(section.name, section.passes_if, 0.0, [], why))
            continue
        outcomes.append(run_section(section, options.device, min(section.seconds, left)))
        show(outcomes[-1])
        if options.json is not None:  # also for whom the machine is taken from
            report(options.json, where, outcomes)
    summary(outcomes)
    if options.json is not None:
        report(options.json, where, outcomes)
    return int(any(outcome.status == "FAIL" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
