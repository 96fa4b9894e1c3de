"""Lets the user's code fail at random actions; each failure must cost its batch and nothing else.

    python -m tests.fail_anywhere --cases 500 --seed 0       every schedule, threads and processes
    python -m tests.fail_anywhere --case 17 --seed 0         this one alone
    python -m tests.fail_anywhere --updates-wait             for all stages, in all cases: none ends

What is kept must have the bits of a run of these batches alone, whose delay begins anew where
others were discarded, and those of the unsplit model where there is a definition at hand. Every
rank must raise the same. Where the documents let a failure end the pipeline, all ranks must raise a
StageError, and what they hold must be readable.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tests.runs.failing import (
    GLOO,
    Case,
    Seen,
    by_oracle,
    difference,
    draw,
    has_oracle,
    is_exact,
    merged,
    run_cases,
)
from tests.runs.launch import RankError, run_ranks

CASE_SECONDS = 60.0
"""After which a case hangs."""

IN_ONE_GO = 16
"""Cases in one set of processes."""


@dataclasses.dataclass
class Outcome:
    case: Case
    by_rank: list[Seen]
    wrong: str

    @property
    def kind(self) -> str:
        if self.wrong:
            return "wrong"
        first = self.by_rank[0]
        if first.ended:
            return "ended, readable"
        return "discarded" if first.raised else "nothing failed"

    @property
    def cause(self) -> str:
        """What let the pipeline end; "" if nothing did."""
        if self.kind != "ended, readable":
            return ""
        case, last = self.case, self.by_rank[0].raised[-1]
        where = "pipedream" if case.schedule == "pipedream" else last.where
        return f"{where}, gloo" if case.transport == GLOO else where


def judge(case: Case, by_rank: list[Seen]) -> str:
    """What is wrong with what the ranks saw, "" if nothing is."""
    for rank, seen in enumerate(by_rank):
        if seen.wrong:
            return f"rank {rank}: {seen.wrong}"
    shown = [[(each.kind, each.discarded) for each in seen.raised] for seen in by_rank]
    if any(each != shown[0] for each in shown):
        return f"ranks raised different errors: {shown}"
    first = by_rank[0]
    if any(seen.met for seen in by_rank) and not first.raised:
        return "something failed, and nothing was raised"
    if first.ended or not has_oracle(case):
        return ""
    losses, state = by_oracle(case, first)
    for rank, seen in enumerate(by_rank):
        own = [of_step[rank // case.depth] for of_step in losses]
        wrong = compare(case, f"rank {rank}: losses", seen.losses[: len(own)], own)
        if wrong:
            return f"oracle: {wrong}"
    got = merged(by_rank, case)
    # Replicas and pipelines have buffers of their own, and the oracle makes whole batches alone.
    has_others = case.width > 1 or "chimera" in case.schedule
    all_alike = not has_others and len(first.kept) % case.accumulate == 0
    names = [n for n in got if all_alike or ("running" not in n and "num_" not in n)]
    return next(filter(None, (compare(case, f"oracle: {n}", got[n], state[n]) for n in names)), "")


def compare(case: Case, where: str, got: object, want: object) -> str:
    if is_exact(case):
        return difference(where, got, want)
    ours, theirs = (torch.as_tensor(each, dtype=torch.float64) for each in (got, want))
    distance = (ours - theirs).norm()
    # Rounded in another order. AdamW divides by roots of squared gradients, some of them nearly 0,
    # and biases are near 0. A wrong version or batch changes each element by some thousandths.
    most = 1e-4 * max(1, theirs.norm()) if case.optimizer == "adamw" else 1e-5 * theirs.norm()
    return "" if distance <= most else f"{where} differs by {distance}"


def outcomes_of(cases: Sequence[Case]) -> list[Outcome]:
    """Of cases that have one number of processes."""
    world = cases[0].world
    outcomes: list[Outcome] = []
    left = list(cases)
    while left:
        try:
            results = run_ranks(
                run_cases,
                world,
                args=(left, CASE_SECONDS),
                rendezvous="file" if world > 1 else "none",
                timeout=(CASE_SECONDS + 5) * len(left),
            )
        except RankError as error:
            bad = min(
                int(result.stdout.split()[-1]) if result.stdout else left[0].number
                for result in error.results
            )
            case = next(each for each in left if each.number == bad)
            outcomes.append(Outcome(case, [], str(error)))
            left.remove(case)
            continue
        for number, case in enumerate(left):
            by_rank = [result.value[number] for result in results]
            wrong = judge(case, by_rank)
            # Each tensor takes a descriptor on its way to the process that asked.
            told = [dataclasses.replace(seen, state={}, moments=None) for seen in by_rank]
            outcomes.append(Outcome(case, told, wrong))
        break
    return outcomes


def in_turns(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """As they come."""
    parts: list[list[Case]] = []
    for _, alike in itertools.groupby(sorted(cases, key=lambda c: c.world), lambda c: c.world):
        of_world = list(alike)
        parts += [of_world[i : i + IN_ONE_GO] for i in range(0, len(of_world), IN_ONE_GO)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(outcomes_of, p) for p in parts]):
            yield from done.result()


def table(outcomes: Sequence[Outcome], keys: Callable[[Outcome], Sequence[object]]) -> str:
    """How many cases of each kind there are, by each key."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for outcome in outcomes:
        for key in {str(key) for key in keys(outcome)}:
            counts[key, outcome.kind] += 1
    lines = [f"| | {' | '.join(kinds)} |", f"|---|{'---:|' * len(kinds)}"]
    for key in sorted({key for key, _ in counts}):
        lines.append(f"| {key} | {' | '.join(str(counts[key, kind]) for kind in kinds)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the number of a case to run alone")
    parser.add_argument("--updates-wait", action="store_true", help="for a norm, in all of them")
    parser.add_argument("--jobs", type=int, default=1, help="sets of processes at once")
    options = parser.parse_args()
    numbers = range(options.cases) if options.case is None else [options.case]
    cases = [draw(number, options.seed) for number in numbers]
    if options.updates_wait:
        cases = [dataclasses.replace(case, clip="norm") for case in cases]
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in in_turns(cases, options.jobs):
        outcomes.append(outcome)
        if outcome.wrong or options.case is not None:
            print(f"{outcome.case}\n    {outcome.kind}: {outcome.wrong}", flush=True)
            for rank, seen in enumerate(outcome.by_rank):
                print(f"    rank {rank} met {seen.met} raised {seen.raised}")
    met = [each for outcome in outcomes for seen in outcome.by_rank for each in seen.met]
    print(f"{len(outcomes)} cases, {len(met)} failures in {time.monotonic() - begin:.0f} s\n")
    for keys in (
        lambda _: ["all"],
        lambda each: [each.cause] if each.cause else [],
        lambda each: [failure.kind for failure in each.case.failures],
        lambda each: [each.case.schedule],
        lambda each: [f"updates wait: {each.case.has_verdicts}"],
        lambda each: [f"{each.case.transport}, d = {each.case.depth}, w = {each.case.width}"],
    ):
        print(table(outcomes, keys), "\n")
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
