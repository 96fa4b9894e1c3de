"""Kills training runs at random moments: what comes back must be the run that would have been.

    python benchmarks/kill_and_resume.py [--rounds 1000] [--signal SIGTERM] [--json PATH]

Each run trains a small model for 24 batches in one of several settings (schedule, optimizer,
precision, replicas, ...) and saves every few batches. A random rank, or all, get SIGKILL at a
random moment, while the pipeline opens, resumes, trains or closes (``--signal SIGTERM``: once a run
has its ``Checkpointer`` it saves itself and ends, and the next life must begin at the very batch
that this one had reached). It goes on from its newest whole checkpoint in another life: with other
numbers of stages and ranks, in threads or in processes, under another schedule of the same delay.
Weights, moments, buffers and losses must end with the bits of the run that nobody disturbed.
"""

from __future__ import annotations

import collections
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring.report import arguments, describe, machine, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' runs

from tests.runs.launch import RankError, RankResult
from tests.runs.lives import (
    SETTINGS,
    differences,
    first_life,
    random_life,
    run_life,
    told,
    whole_of,
)

_MOST_LIVES = 12
_PREEMPTED = 128 + signal.SIGTERM


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=1000)
    parser.add_argument("--signal", choices=["SIGKILL", "SIGTERM"], default="SIGKILL")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 8
    where = machine()
    print(describe(where), flush=True)
    draw = random.Random(options.seed)
    settings = {name: each for name, each in SETTINGS.items() if options.only in name}
    kills: collections.Counter[str] = collections.Counter()
    runs: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
        folder = Path(name)
        undisturbed = {
            name: whole_of(run_life(each, first_life(each), folder / f"undisturbed {name}"))
            for name, each in settings.items()
        }
        while sum(kills.values()) < options.rounds:
            for name in settings:
                number = sum(runs.values())
                made, found = _one_run(
                    name, undisturbed[name], folder / str(number), draw, options.signal
                )
                kills[name] += made
                runs[name] += 1
                for each in found:
                    wrong.append(f"{name}, run {number}: {each}")
                    print(wrong[-1], flush=True)
                if sum(kills.values()) >= options.rounds:
                    break
    seconds = time.monotonic() - begin
    print(f"{'setting':28} {'runs':>5} {'kills':>6}")
    for name in settings:
        print(f"{name:28} {runs[name]:5} {kills[name]:6}")
    print(f"{sum(kills.values())} kills in {sum(runs.values())} runs, {seconds:.0f} s")
    if not wrong:
        print("every run ended with the bits of the undisturbed one")
    write_json(
        options.json,
        where,
        [],
        signal=options.signal,
        seconds=seconds,
        kills=kills,
        runs=runs,
        wrong=wrong,
        smoke=options.smoke,
    )
    sys.exit(bool(wrong))


def _one_run(
    name: str, undisturbed: dict[str, object], folder: Path, draw: random.Random, by: str
) -> tuple[int, list[str]]:
    """A run in several lives; gives how often it was killed, and what is wrong."""
    setting, kills, may_start = SETTINGS[name], 0, range(1)
    for _ in range(draw.randrange(1, _MOST_LIVES)):
        life = random_life(setting, draw, by=signal.Signals[by], anywhere=True)
        try:
            results = run_life(setting, life, folder)
        except RankError as error:
            if any(result.exit_code for result in error.results):
                return kills, [f"a life did not end as it should: {error}"]
            if wrong := _wrong_starts(error.results, may_start):
                return kills, [f"{each}: {life}" for each in wrong]
            may_start = _starts_after(error.results, may_start)
            break  # it came to its end before
        kills += 1
        wrong = _wrong_starts(results, may_start)
        if by == "SIGTERM":
            wrong += _wrong_ends(results)
        if wrong:
            return kills, [f"{each}: {life}" for each in wrong]
        may_start = _starts_after(results, may_start)
    try:
        results = run_life(setting, random_life(setting, draw, by=None), folder)
    except RankError as error:
        return kills, [f"the last life failed: {error}"]
    wrong = _wrong_starts(results, may_start)
    return kills, wrong + differences(whole_of(results), undisturbed)


def _wrong_starts(results: Sequence[RankResult], may_start: range) -> list[str]:
    starts = [told(result)["start"] for result in results if "start" in told(result)]
    if len(set(starts)) > 1 or not all(start in may_start for start in starts):
        return [f"it went on from batches {starts}, all must be one of {list(may_start)}"]
    return []


def _wrong_ends(results: Sequence[RankResult]) -> list[str]:
    """What is wrong with the exit codes of a run that SIGTERM came to."""
    codes = [result.exit_code for result in results]
    if set(codes) == {_PREEMPTED}:
        return []
    for result in results:
        is_noticing = "resuming" in told(result) and "closing" not in told(result)
        if result.exit_code == -signal.SIGTERM and not is_noticing:
            return []  # which the other ranks do not survive
    errors = "\n".join(result.stderr for result in results)
    return [f"exit codes {codes}, all must be {_PREEMPTED}: {errors}"]


def _starts_after(results: Sequence[RankResult], may_start: range) -> range:
    """From which batches the next life may go on."""
    starts = [told(result)["start"] for result in results if "start" in told(result)]
    # One that was resumed at its end tells of no further batch.
    ends = [max(told(result).get(word, 0) for word in ("start", "batch")) for result in results]
    if all(result.exit_code == _PREEMPTED for result in results):
        return range(ends[0], ends[0] + 1) if len(set(ends)) == 1 else range(0)
    least = starts[0] if starts else may_start[0]
    return range(least, max([may_start[-1] if not starts else least, *ends]) + 1)


if __name__ == "__main__":
    main()
