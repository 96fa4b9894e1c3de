"""Leaves out all, and prints what became of the trainings; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch
from tqdm import tqdm

from tests.device import checked
from tests.device.prove import one_process, two_processes
from tests.device.prove.outcomes import KINDS, MISSED, WORDS

MOST_SECONDS = 3600.0
"""For a training of two processes."""


def main() -> int:
    parser = argparse.ArgumentParser(description="leave out each wait of trainings, one at a time")
    parser.add_argument("--every", type=int, default=1, help="one of so many is left out")
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    checked.set_timeout(20.0)
    missed = 0
    print(f"{'training':28}{'kind':16}" + "".join(f"{word:>12}" for word in ("left out", *WORDS)))
    for name in (*one_process.TRAININGS, *two_processes.TRAININGS):
        if given.only not in name:
            continue
        if name in one_process.TRAININGS:
            outcomes = one_process.prove(one_process.TRAININGS[name], given.every)
        else:
            outcomes = iter(two_processes.prove(name, given.every, MOST_SECONDS))
        counts = {kind: Counter[str]() for kind in KINDS}
        for kind, n, word in tqdm(outcomes, desc=name, disable=None):
            counts[kind][word] += 1
            if word == MISSED:
                print(f"  missed: {kind.name} {n}", flush=True)
        for kind, found in counts.items():
            numbers = [found.total(), *(found[word] for word in WORDS)]
            line = "".join(f"{each:12}" for each in numbers)
            print(f"{name:28}{kind.name.lower():16}{line}", flush=True)
        missed += sum(found[MISSED] for found in counts.values())
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
