"""The loss that late forwards cost: 2bw, 2bw_fresh and synchronous training of a small GPT.

    python benchmarks/convergence/fresh_forwards.py [--seeds 1] [--batches 400] [--smoke]
        [--json PATH]

Four stages and sixteen microbatches, on the same batches from the same weights. Without a pipeline
the number of stages would not matter; here each stage has its own number of late forwards.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from study import Method, as_json, parse_options, run
from tasks import byte_gpt

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.report import compact, describe, machine

SIZES = {"num_stages": 4, "num_microbatches": 16}
LEARNING_RATES = (3e-3, 1e-2)


def methods() -> list[Method]:
    feedback = (pd2.ErrorFeedback(),)
    return [
        Method("synchronous", schedule="1f1b", of_pipeline=SIZES),
        Method("2bw", of_pipeline=SIZES),
        Method("2bw, error feedback", staleness=feedback, of_pipeline=SIZES),
        Method("2bw_fresh", schedule="2bw_fresh", of_pipeline=SIZES),
        Method("2bw_fresh, error feedback", "2bw_fresh", staleness=feedback, of_pipeline=SIZES),
    ]


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*its gradients are late")
    where = machine()
    print(describe(where), flush=True)
    task = byte_gpt(rows=16) if options.smoke else byte_gpt(16, 64, layers=3, width=128)
    rates = LEARNING_RATES[:1] if options.smoke else LEARNING_RATES
    found: list[dict[str, Any]] = []
    for rate, seed in itertools.product(rates, range(options.seeds)):
        synchronous = 0.0
        for method in methods():
            result = run(task, "AdamW", method, rate, seed, options.batches)
            synchronous = synchronous or result.held_out_loss
            over = 100 * (result.held_out_loss / synchronous - 1)
            print(
                f"AdamW {rate:g}, seed {seed}: {method.name:<26} held out "
                f"{result.held_out_loss:.4f} ({over:+.1f} %)",
                flush=True,
            )
            found.append(as_json(result))
    if options.json is not None:
        command = (
            "python benchmarks/convergence/fresh_forwards.py "
            f"--seeds {options.seeds} --batches {options.batches}"
        )
        report = {"command": command, "machine": where, "results": found}
        options.json.write_text(compact(report))


if __name__ == "__main__":
    main()
