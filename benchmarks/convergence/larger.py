"""What late forwards cost a larger model on a GPU, by the pipeline itself, in one process.

    python benchmarks/convergence/larger.py [--only NAME ...] [--batches 2000] [--seeds 1]
        [--jobs 1] [--kept PATH] [--json PATH] [--smoke]

A GPT of 6.6M parameters trains on 131M bytes, 20 for each parameter, that are drawn from the
machine's Python sources. It has four stages, 16 microbatches of 4,096 bytes, bfloat16 with float32
masters, warm-up and cosine decay. Runs of one seed have the same first weights and batches. What a
run gave is a line of ``--kept``, written when it ends; a run that is kept is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import random
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from late_forwards import (
    NUM_LOOKS,
    PIPELINE,
    Method,
    Result,
    Sizes,
    Table,
    Wanted,
    adamw,
    as_json,
    by_pipeline,
    line,
    muon,
    train_on,
)
from runs import Workers
from tasks import GPT, RandomBatches, Task

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.report import compact, describe, machine

D, M = 4, 16
LARGE = Sizes(layers=8, width=256, context=256, rows=256, num_held_out=1024)
OPTIMIZERS = {  # AdamW by the pipeline's fused pass
    "AdamW, beta1 0.9": functools.partial(adamw, 0.9, kind=torch.optim.AdamW),
    "Muon": functools.partial(muon, kind=torch.optim.AdamW),
}
# Lower than the smaller model's, as is usual; not tuned.
RATES = {"AdamW, beta1 0.9": 0.002, "Muon": 0.004}
METHODS = (
    Method("1f1b", D, M),
    Method("2bw_fresh", D, M, feedback=True),
    Method("2bw", D, M),
    Method("2bw_fresh", D, M),
    Method("2bw", D, M, feedback=True),
)
MOST_BYTES = 128 * 2**20


@functools.cache
def sources() -> torch.Tensor:
    """The Python files of the library and of the installed packages, in an order drawn once."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib")}
    files = sorted({file for root in roots for file in Path(root).rglob("*.py")})
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        text += file.read_bytes() + b"\n"
        if len(text) > MOST_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy in nats per byte, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def task_on(device: str, sizes: Sizes) -> Task:
    """The byte GPT of the other studies on those sources, its batches on the device."""
    text = sources().to(device)
    held_out, training = text[: len(text) // 20], text[len(text) // 20 :]
    shape = {"num_layers": sizes.layers, "width": sizes.width, "context": sizes.context}
    return Task(
        name="byte GPT",
        unit="nats per byte",
        build=lambda: GPT(num_heads=4, **shape).to(device),
        loss_fn=loss_fn,
        batches=lambda seed: RandomBatches(training, sizes.rows, sizes.context, seed),
        held_out=next(RandomBatches(held_out, sizes.num_held_out, sizes.context, seed=0)),
        is_inner=lambda name: name.startswith("blocks."),
        learning_rates={},
    )


def train(wanted: Wanted) -> Result:
    """On a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graphs = "auto" if device == "cuda" else False
    way = functools.partial(by_pipeline, optimizers=OPTIMIZERS, precision="bf16", graphs=graphs)
    return train_on(task_on(device, wanted.sizes), wanted, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--kept", type=Path, metavar="PATH", help="what runs gave, as they end")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there")
    parser.add_argument("--smoke", action="store_true", help="quick: the figures mean nothing")
    options = parser.parse_args()
    sizes = LARGE
    if options.smoke:
        sizes, options.batches, options.only = Sizes(4, 16, 8, 16, 16), NUM_LOOKS, ["Muon"]
    where = machine()
    print(describe(where), flush=True)
    wanted = [
        Wanted(name, method, RATES[name], seed, options.batches, sizes, PIPELINE)
        for seed, name in itertools.product(range(options.seeds), options.only)
        for method in METHODS
    ]
    with Workers(train, Result, line, jobs=options.jobs, kept=options.kept) as workers:
        table = Table(RATES, workers.run_all(wanted))
    print(f"\n{table}")
    if options.json is not None:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where,
            "measure": "held-out loss",
            "batches": options.batches,
            "sizes": dataclasses.asdict(sizes),
            "rows": list(map(as_json, table.rows())),
            "runs": list(map(dataclasses.asdict, table.results)),
        }
        options.json.write_text(compact(report))


if __name__ == "__main__":
    main()
