"""Stops and kills every rank at random moments; all others must end within timeout + 3 s.

    python -m tests.stop_and_kill          every rank, d = 2, 3, 4, w = 1, 2, every schedule
    python -m tests.stop_and_kill --depths 3 --widths 1 --schedules 2bw --jobs 2

Each end must be a PeerTimeout, a PeerLost or a StageError, and the process must exit by itself.
On a machine with few cores a rank may be late without waiting for anyone, because others run. So a
case that is late is run again alone, with nothing else on the machine: late there too, it fails. A
rank that has not ended after 20 s hangs, whatever the load, and fails at once, with its stacks.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pipedream2bw as pd2
from tests.runs.launch import RankError
from tests.runs.stopping import Case, Survivor, every_case, survivors_of


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: Case
    survivors: list[Survivor]
    hang: str = ""

    @property
    def longest(self) -> float:
        return max((survivor.ended for survivor in self.survivors), default=0.0)

    @property
    def wrong(self) -> str:
        """What is wrong with it, "" if nothing is."""
        for survivor in self.survivors:
            if not survivor.is_typed():
                return f"rank {survivor.rank}: {survivor.kind}: {survivor.text}"
        return self.hang

    @property
    def is_late(self) -> bool:
        return self.longest > self.case.limit


def outcome_of(case: Case) -> Outcome:
    try:
        return Outcome(case, survivors_of(case))
    except RankError as error:
        return Outcome(case, [], str(error))


def outcomes_of(cases: Iterable[Case], jobs: int) -> Iterator[Outcome]:
    """As they come; those that are late once more, alone, when all others are done."""
    late: list[Case] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(outcome_of, c) for c in cases]):
            outcome = done.result()
            if outcome.is_late and not outcome.wrong and jobs > 1:
                late.append(outcome.case)
            else:
                yield outcome
    yield from map(outcome_of, late)


def table(outcomes: list[Outcome], key: Callable[[Case], object]) -> str:
    """Cases, failures, kinds of errors and the slowest end, for each value of the key."""
    lines = []
    for value in sorted({str(key(outcome.case)) for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if str(key(outcome.case)) == value]
        kinds = collections.Counter(s.kind for outcome in mine for s in outcome.survivors)
        bad = sum(bool(outcome.wrong) or outcome.is_late for outcome in mine)
        longest = max(outcome.longest - outcome.case.timeout for outcome in mine)
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        lines.append(f"| {value} | {len(mine)} | {bad} | {longest:+.2f} s | {shown} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--schedules", nargs="+", default=pd2.schedule_names())
    parser.add_argument("--timeout", type=float, default=4.0, help="the pipelines'; seconds")
    parser.add_argument("--seed", type=int, default=0, help="chooses moments and transports")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--limit", type=int, help="only so many of the cases, chosen evenly")
    parser.add_argument("--json", type=Path, help="where to write all outcomes")
    options = parser.parse_args()
    cases = list(
        every_case(
            options.depths,
            options.widths,
            options.schedules,
            seed=options.seed,
            timeout=options.timeout,
        )
    )
    if options.limit:
        cases = cases[:: max(1, len(cases) // options.limit)]
    begin = time.monotonic()
    outcomes = []
    for outcome in outcomes_of(cases, options.jobs):
        outcomes.append(outcome)
        if outcome.wrong or outcome.is_late:
            what = outcome.wrong or f"late: {outcome.longest:.2f} s, {outcome.survivors}"
            print(f"{outcome.case}\n    {what}", flush=True)
    print(f"{len(outcomes)} cases in {time.monotonic() - begin:.0f} s")
    print("\n| | cases | wrong or late | slowest end after the timeout | errors of the others |")
    print("|---|---:|---:|---:|---|")
    print(table(outcomes, lambda case: f"{case.sent} in {case.moment}"))
    print(table(outcomes, lambda case: f"d = {case.depth}, w = {case.width}"))
    print(table(outcomes, lambda case: case.schedule))
    print(table(outcomes, lambda case: case.transport))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes]))
    return int(any(outcome.wrong or outcome.is_late for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
