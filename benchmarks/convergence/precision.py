"""What each precision does to the loss under 2BW: curves beside float32.

    python benchmarks/convergence/precision.py [--seeds 3] [--batches 200] [--smoke]
        [--json PATH] [--pictures FOLDER]

Trains the byte GPT by AdamW under ``2bw`` on the same batches from the same weights: in float32, in
bfloat16 and float16 with float32 masters, with split masters, and under autocast. README.md beside
this file says what came out.
"""

from __future__ import annotations

import time

import torch
from study import WINDOW, Method, Result, as_json, parse_options, row, run
from tasks import byte_gpt

import pipedream2bw as pd2

from measuring.report import compact, describe, machine  # isort: skip  # study.py says where

OPTIMIZER, LEARNING_RATE = "AdamW", 3e-3  # the best of the other study

METHODS = [
    Method("float32"),
    Method("bfloat16", of_pipeline={"precision": "bf16"}),
    Method("bfloat16, split masters", of_pipeline={"precision": "bf16", "split_master": True}),
    Method(
        "float16, loss scale",
        of_pipeline={"precision": "fp16"},
        loss_scale=pd2.LossScale(growth_interval=50),
    ),
    Method("autocast, bfloat16", of_pipeline={"autocast": torch.bfloat16}),
]


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    start = time.perf_counter()
    task = byte_gpt()
    results: list[Result] = []
    for method in METHODS:
        mine = [
            run(task, OPTIMIZER, method, LEARNING_RATE, seed, options.batches)
            for seed in range(options.seeds)
        ]
        results += mine
        print("  " + row(mine), flush=True)
    minutes = (time.perf_counter() - start) / 60
    report = {
        "command": f"python benchmarks/convergence/precision.py --seeds {options.seeds} "
        f"--batches {options.batches}",
        "machine": where,
        "minutes": round(minutes, 1),
        "window": WINDOW,
        "results": [as_json(result) for result in results],
    }
    if options.json is not None:
        options.json.write_text(compact(report))
    if options.pictures is not None:
        from pictures import draw

        draw(report, options.pictures, "{}_precision")


if __name__ == "__main__":
    main()
