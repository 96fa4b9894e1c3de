"""Tells whether scripts run to their end: each with --smoke, so that it is quick.

    python -m tests.smoke [--jobs 2] benchmarks/schedules.py ...

They are forked from one process that has imported torch and the package, which takes a processor
longer than many of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.runs.launch import RankError, run_ranks

TIMEOUT = 600.0


def smoke(script: Path) -> str | None:
    """Returns what a script that failed wrote, None if it did not fail."""
    start = time.monotonic()
    try:
        run_ranks(script.resolve(), 1, args=("--smoke",), timeout=TIMEOUT, rendezvous="none")
    except RankError as error:
        return f"== {script}\n{error}"
    print(f"{script}: {time.monotonic() - start:.0f} s", flush=True)
    return None


def main() -> int:
    """Runs the scripts, some at once; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    parser.add_argument("scripts", type=Path, nargs="+")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [text for text in pool.map(smoke, options.scripts) if text is not None]
    print(*failed, sep="\n", end="", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
