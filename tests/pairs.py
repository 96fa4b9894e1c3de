"""Trains by random options together, in runs that are saved, go on elsewhere and are disturbed.

    python -m tests.pairs --seed 0 --cases 1000 --jobs 2     threads, and processes
    python -m tests.pairs --seed 0 --case 17                 this one alone

A case draws values of all options that the tables let go together, a model with tied weights,
BatchNorm, dropout or frozen parts, an optimizer, and what is done around the batches: saving and
going on in another layout, evaluating, reading and loading states, discarding batches, flushing.
What comes out is compared with the definition, run on the unsplit model. What the tables exclude is
given seldom: it must be refused by the name of an option.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.runs.launch import RankError, run_ranks
from tests.runs.pairs import Case, draw_case, outcomes

CASE_SECONDS = 60.0
"""After which a case hangs."""

IN_ONE_GO = 16
"""Cases in one process."""


def failures(seed: str, numbers: Iterable[int], jobs: int = 1) -> Iterator[tuple[Case, str]]:
    """Each case with what is wrong about it, "" if nothing is."""
    by_world: dict[int, list[Case]] = collections.defaultdict(list)
    for number in numbers:
        case = draw_case(seed, number)
        by_world[case.parts[0].world].append(case)
    batches = [
        cases[i : i + IN_ONE_GO]
        for _, cases in sorted(by_world.items())
        for i in range(0, len(cases), IN_ONE_GO)
    ]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(run_together, batches):
            yield from found


def run_together(cases: list[Case]) -> list[tuple[Case, str]]:
    """Cases of one number of processes."""
    found: list[tuple[Case, str]] = []
    left = cases
    while left:
        # What a process is left with by a failure is not the next case's.
        world = left[0].parts[0].world
        with tempfile.TemporaryDirectory() as folder:
            args = (left[0].seed, [case.number for case in left], folder)
            error = ""
            try:
                run_ranks(
                    outcomes,
                    max(world, 1),
                    args=args,
                    timeout=CASE_SECONDS + 5.0 * len(left),
                    rendezvous="file" if world else "none",
                )
            except RankError as failure:
                error = str(failure)
            ended = len(list(Path(folder).glob("ended-*")))
        found += [(case, "") for case in left[:ended]]
        if not error:
            break
        found.append((left[ended], error))
        left = left[ended + 1 :]
    return found


def main() -> int:
    """Runs the cases; 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", default="0")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    begin = time.perf_counter()
    counts: collections.Counter[str] = collections.Counter()
    for case, error in failures(options.seed, numbers, options.jobs):
        counts[case.kind] += 1
        if options.case is not None:
            print(case.described())
        if error:
            counts["failed"] += 1
            print(f"{case.command}\n{error}", flush=True)
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    print(f"{told}; {time.perf_counter() - begin:.0f} s")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
