"""Kills training runs at random moments: what comes back must be the run that would have been.

    python benchmarks/kill_and_resume.py [--rounds 1000] [--signal SIGTERM] [--json PATH]

Each run trains a small model for 24 batches in one of several settings (schedule, optimizer,
precision, replicas, ...) and saves every few batches. A random rank, or all, get SIGKILL at a
random moment, while the pipeline opens, resumes, trains or closes (``--signal SIGTERM``: once a run
has its ``Checkpointer`` it saves itself and ends, and the next life must begin at the very batch
that this one had reached; only these are rounds, as before and after it a signal ends a process as
ever). It goes on from its newest whole checkpoint in another life: with other
numbers of stages and ranks, in threads or in processes, under another schedule of the same delay.
Weights, moments, buffers and losses must end with the bits of the run that nobody disturbed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
        options.rounds = 1
    where = machine()
    print(describe(where), flush=True)
    draw = random.Random(options.seed)
    settings = {name: each for name, each in SETTINGS.items() if options.only in name}
    if options.smoke:
        settings = dict(itertools.islice(settings.items(), 1))
    kills: collections.Counter[str] = collections.Counter()
    saved: collections.Counter[str] = collections.Counter()
    runs: collections.Counter[str] = collections.Counter()
    rounds = saved if options.signal == "SIGTERM" else kills
    wrong: list[str] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
        folder = Path(name)
        undisturbed = {
            name: whole_of(run_life(each, first_life(each), folder / f"undisturbed {name}"))
            for name, each in settings.items()
        }
        while sum(rounds.values()) < options.rounds:
            for name in settings:
                number = sum(runs.values())
                run = _one_run(name, undisturbed[name], folder / str(number), draw, options.signal)
                kills[name] += run.kills
                saved[name] += run.saved
                runs[name] += 1
                for each in run.wrong:
                    wrong.append(f"{name}, run {number}: {each}")
                    print(wrong[-1], flush=True)
                if sum(rounds.values()) >= options.rounds:
                    break
    seconds = time.monotonic() - begin
    print(f"{'setting':28} {'runs':>5} {'kills':>6}")
    for name in settings:
        print(f"{name:28} {runs[name]:5} {kills[name]:6}")
    print(f"{sum(kills.values())} kills in {sum(runs.values())} runs, {seconds:.0f} s")
    if options.signal == "SIGTERM":
        print(f"{sum(saved.values())} saved; the others came before or after the Checkpointer")
    if not wrong:
        print("every run ended with the bits of the undisturbed one")
    write_json(
        options.json,
        where,
        [],
        signal=options.signal,
        seconds=seconds,
        kills=kills,
        **({"saved": saved} if options.signal == "SIGTERM" else {}),
        runs=runs,
        wrong=wrong,
        smoke=options.smoke,
    )
    sys.exit(bool(wrong))


@dataclasses.dataclass
class _Run:
    """What became of a run in several lives.

    Attributes:
        kills: how often it was killed.
        saved: how many of these times all ranks ended as those do that have saved the run.
        wrong: what is wrong.
    """

    kills: int = 0
    saved: int = 0
    wrong: Sequence[str] = ()


def _one_run(
    name: str, undisturbed: dict[str, object], folder: Path, draw: random.Random, by: str
) -> _Run:
    """A run in several lives."""
    setting, run, may_start = SETTINGS[name], _Run(), range(1)
    for _ in range(draw.randrange(1, _MOST_LIVES)):
        life = random_life(setting, draw, by=signal.Signals[by], anywhere=True)
        try:
            results = run_life(setting, life, folder)
        except RankError as error:
            if any(result.exit_code for result in error.results):
                run.wrong = [f"a life did not end as it should: {error}"]
            else:
                run.wrong = [f"{e}: {life}" for e in _wrong_starts(error.results, may_start)]
            if run.wrong:
                return run
            may_start = _starts_after(error.results, may_start)
            break  # it came to its end before
        run.kills += 1
        wrong = _wrong_starts(results, may_start)
        if by == "SIGTERM":
            wrong += _wrong_ends(results)
        if wrong:
            run.wrong = [f"{each}: {life}" for each in wrong]
            return run
        run.saved += _have_saved(results)  # which the next life's start shows
        may_start = _starts_after(results, may_start)
    try:
        results = run_life(setting, random_life(setting, draw, by=None), folder)
    except RankError as error:
        run.wrong = [f"the last life failed: {error}"]
        return run
    wrong = _wrong_starts(results, may_start)
    run.wrong = wrong + differences(whole_of(results), undisturbed)
    return run


def _have_saved(results: Sequence[RankResult]) -> bool:
    return all(result.exit_code == _PREEMPTED for result in results)


def _wrong_starts(results: Sequence[RankResult], may_start: range) -> list[str]:
    starts = [told(result)["start"] for result in results if "start" in told(result)]
    if len(set(starts)) > 1 or not all(start in may_start for start in starts):
        return [f"it went on from batches {starts}, all must be one of {list(may_start)}"]
    return []


def _wrong_ends(results: Sequence[RankResult]) -> list[str]:
    """What is wrong with the exit codes of a run that SIGTERM came to."""
    if _have_saved(results):
        return []
    for result in results:
        is_noticing = "resuming" in told(result) and "closing" not in told(result)
        if result.exit_code == -signal.SIGTERM and not is_noticing:
            return []  # which the other ranks do not survive
    codes = [result.exit_code for result in results]
    errors = "\n".join(result.stderr for result in results)
    return [f"exit codes {codes}, all must be {_PREEMPTED}: {errors}"]


def _starts_after(results: Sequence[RankResult], may_start: range) -> range:
    """From which batches the next life may go on."""
    starts = [told(result)["start"] for result in results if "start" in told(result)]
    # One that was resumed at its end tells of no further batch.
    ends = [max(told(result).get(word, 0) for word in ("start", "batch")) for result in results]
    if _have_saved(results):
        return range(ends[0], ends[0] + 1) if len(set(ends)) == 1 else range(0)
    least = starts[0] if starts else may_start[0]
    return range(least, max([may_start[-1] if not starts else least, *ends]) + 1)


if __name__ == "__main__":
    main()
