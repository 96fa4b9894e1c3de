"""Damages checkpoints: each damage must be refused by the file's name, and nothing else touched.

    python -m tests.damage                      a few seconds
    python -m tests.damage --flips 100000       every way, and so many random bits

Every damage is given to `pipedream2bw checkpoint verify`, which reads all bytes. A share of the
flipped bits, and all other damages, are also loaded into a run under way, whose weights, moments,
counters and random numbers must stay as they were, and resumed from: the older checkpoint is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.runs.damaging import KINDS, Victim


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=300, help="of random bits, in all")
    parser.add_argument("--loads", type=float, default=0.1, help="the share that is also loaded")
    parser.add_argument("--resumes", type=float, default=0.02, help="the share resumed from")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for number, kind in enumerate(KINDS):
        with (
            tempfile.TemporaryDirectory() as name,
            contextlib.closing(Victim(Path(name), kind)) as victim,
        ):
            size = sum((victim.place / each).stat().st_size for each in victim.files)
            print(f"{kind}: {len(victim.files)} files, {size} bytes")
            flips = options.flips // len(KINDS) + (number < options.flips % len(KINDS))
            draw = random.Random(options.seed * len(KINDS) + number)
            for what, damage in {
                "cut": lambda victim=victim: victim.cut(4096),
                "missing, foreign or swapped": victim.lose_and_replace,
                "headers": victim.lie_about_headers,
                "sums": victim.lie_about_sums,
                "files beside": victim.add_foreign_files,
                "flipped bits": lambda victim=victim, flips=flips, draw=draw: victim.flip(
                    flips, draw, loads=options.loads, resumes=options.resumes
                ),
            }.items():
                victim.begin_counting()
                begin = time.monotonic()
                damage()
                counts, seconds = victim.counts, time.monotonic() - begin
                print(
                    f"  {what}: {counts.made} in {seconds:.0f} s; verify refused "
                    f"{counts.verified}, load {counts.loaded}, resume took the older one "
                    f"{counts.resumed} times; loaded to the same bits: {counts.not_read or 0}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
