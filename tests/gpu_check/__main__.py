"""Asks a device all that only a device can answer, and prints a table.

    python -m tests.gpu_check [--device cuda] [--json PATH] [--no-build] [--part 1|2|3]
        [--only NAMES] [--seconds 540]
    python -m tests.gpu_check --report PATH

docs/gpu.md says how to run it and how to read it. Needs torch, setuptools, wheel and ninja, and
neither a network nor a virtual environment.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import building
from .goals import tables
from .machine import machine
from .report import Report, show, summary
from .running import Changed, Outcome, Recorded, run_section
from .section import NO_TIME, Rows, Section
from .sections import BUILD, PART, PARTS, SECTIONS, WHOLE

TOO_LATE = 8.0
"""Seconds: a section that would have fewer is not begun, as its process takes most of them."""


def build(device: str, left: float, *, builds: bool, changed: Changed) -> Outcome:
    """Builds the extension, or looks whether what is there can be used."""
    recorded = Recorded(BUILD, changed)
    with recorded.followed() as outcome:
        rows = Rows(recorded.path, measures=True)
        if not building.run(device, rows, BUILD.seconds, left=left, builds=builds):
            outcome.failure = "nothing else can be asked"
    return recorded.outcome


def limit_of(section: Section, behind: Sequence[Section], left: float) -> float:
    """Its own seconds, and as many again of those that nobody needs by their limits."""
    unused = max(left - section.seconds - sum(each.seconds for each in behind), 0.0)
    return max(min(left, section.seconds + min(unused, section.seconds)), 0.0)


def ask(options: argparse.Namespace, report: Report, end: float) -> None:
    """Builds, and runs one section after the other until the time is over."""
    is_first = options.part in (None, 1)
    builds = is_first and not options.no_build
    built = build(options.device, end - time.monotonic(), builds=builds, changed=report.put)
    show(built)
    pictures = options.json.parent.resolve() if options.json is not None else None
    for number, section in enumerate(options.only):
        left = end - time.monotonic()
        if built.failure or left < TOO_LATE:
            report.put(not_begun(section, built.failure or NO_TIME))
            continue
        seconds = limit_of(section, options.only[number + 1 :], left)
        outcome = run_section(
            section, options.device, seconds, changed=report.put, pictures=pictures
        )
        show(outcome)


def not_begun(section: Section, why: str) -> Outcome:
    return Outcome(section.name, section.passes_if, 0.0, [], f"not begun: {why}")


def chosen(text: str) -> list[Section]:
    names = [name.strip() for name in text.split(",")]
    known = {section.name: section for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return [known[name] for name in names]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "checked"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    parser.add_argument(
        "--no-build", action="store_true", help="use the build that is there, if it can be imported"
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--part", type=int, choices=tuple(PARTS), help="2 and 3 use the build that is there"
    )
    some.add_argument("--only", type=chosen, help="names of sections, by comma")
    parser.add_argument(
        "--seconds", type=float, help=f"for everything: {WHOLE:g}, and {PART:g} for a part"
    )
    parser.add_argument(
        "--report", type=Path, metavar="PATH", help="print the documents' tables from such a JSON"
    )
    options = parser.parse_args()
    if options.only is None:
        options.only = list(SECTIONS if options.part is None else PARTS[options.part])
    if options.seconds is None:
        options.seconds = WHOLE if options.part is None else PART
    return options


def main() -> int:
    options = parse()
    if options.report is not None:
        print(tables(options.report))
        return 0
    end = time.monotonic() + options.seconds
    where = machine(options.device)
    print(f"{where['device']}; torch {where['torch']}, Python {where['python']}", flush=True)
    report = Report(options.json, where)
    try:
        ask(options, report, end)
    except KeyboardInterrupt:  # what was running says so itself
        asked = {outcome.name for outcome in report.outcomes}
        for section in options.only:
            if section.name not in asked:
                report.put(not_begun(section, "interrupted"))
    summary(report.outcomes)
    if options.json is not None:
        print(f"\nevery row: {options.json}; --report {options.json} prints the documents' tables")
    return int(any(outcome.status == "FAIL" for outcome in report.outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whose time is over is told so first
    sys.exit(main())
