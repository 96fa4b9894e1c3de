"""Gives what reads files changed files: each must be read or refused by a ValueError, soon.

python -m tests.fuzz                                    10^6 inputs of every format
python -m tests.fuzz --inputs 10000000 --only manifest
python -m tests.fuzz --only plan --first 1234 --inputs 1 --keep plan.json
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
from pathlib import Path

from .formats import FORMATS, corpus_of
from .run import Broken, input_of, run

_MOST_BYTES = 2**30
_BLOCK = 10_000


def main() -> int:
    """Gives the inputs; 1 if one of them is not dealt with as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10**6, help="of each format")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FORMATS, nargs="*", default=list(FORMATS))
    parser.add_argument("--keep", type=Path, help="where the last input is written")
    options = parser.parse_args()
    _limit_memory()
    broken = 0
    for name in options.only:
        try:
            _give_all(name, options.first, options.inputs, options.seed)
        except Broken as problem:
            print(problem, problem.__cause__, sep="\n", file=sys.stderr)
            broken = 1
            if options.keep:
                options.keep.write_bytes(problem.data)
                continue
        if options.keep:
            last = options.first + options.inputs - 1
            options.keep.write_bytes(input_of(name, options.seed, last, corpus_of(name)))
    return broken


def _give_all(name: str, first: int, count: int, seed: int) -> None:
    begin = time.perf_counter()
    read, refused, slowest = 0, 0, 0.0
    for start in range(first, first + count, _BLOCK):
        numbers = range(start, min(start + _BLOCK, first + count))
        # Native code that hangs cannot be interrupted: the stack is shown, and the process ends.
        faulthandler.dump_traceback_later(300, exit=True)
        result = run(name, numbers, seed)
        read += result.num_read
        refused += result.num_refused
        slowest = max(slowest, result.slowest)
    faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - begin
    print(
        f"{name}: {read + refused} inputs, {read} read, {refused} refused, {seconds:.0f} s, "
        f"{count / seconds:.0f} inputs/s, slowest {slowest * 1e3:.0f} ms",
        flush=True,
    )


def _limit_memory() -> None:
    """What takes a gigabyte more than now gets a MemoryError, which is refused by no ValueError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
