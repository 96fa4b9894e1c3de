"""What a pipeline asks of its devices for a microbatch, counted on the checked device.

The checked device (docs/design/checked-device.md) lists what each thread asks: launches, of which a
graph's is one, transfers, and waits of a host; and it counts the events that streams wait for and
the tensors that are recorded on another stream. These numbers are the same in every run but for the
turns of threads, and on a GPU each of them takes a host microseconds. What the model's own
operators launch is in them.

    python benchmarks/device_requests.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import sys

import torch
from measuring.report import ROOT, Figure, arguments, describe, machine, print_table, write_json

sys.path.insert(0, str(ROOT))  # ranks import what they run by a name from there

from benchmarks.measuring.device_requests import SETTINGS, count, of_rank
from tests.runs.launch import run_ranks


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=1).parse_args()
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    print("for a microbatch of a stage of two blocks, forward and backward, in the steady state\n")
    figures = []
    for number, setting in enumerate(SETTINGS[:2] if options.smoke else SETTINGS):
        if setting.processes == 1:
            counts = count(setting, 0)
        else:
            results = run_ranks(
                of_rank, setting.processes, args=(number,), rendezvous="environment", timeout=120
            )
            counts = results[0].value
        figures += [Figure(setting.name, name, [value]) for name, value in counts.items()]
    print_table(figures, judged=False)
    write_json(options.json, where, figures)


if __name__ == "__main__":
    main()
