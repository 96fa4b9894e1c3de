"""What late forwards cost a larger model on a GPU, by the pipeline itself, in one process.

    python benchmarks/convergence/larger.py [--only NAME ...] [--rates RATE ...] [--methods 5]
        [--batches 2000] [--seeds 1] [--jobs 1] [--device cuda] [--kept PATH] [--json PATH]
        [--smoke]

A GPT of 6.6M parameters trains on the Python sources of the machine, 131M bytes of them: 20 for
each parameter. It has four stages, 16 microbatches of 4,096 bytes, bfloat16 with float32 masters,
warm-up and cosine decay. Runs of one seed have the same first weights and the same batches. What a
run gave is a line of ``--kept``, written when it ends; a run that is kept is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from late_forwards import BETA2, NUM_LOOKS, WEIGHT_DECAY, Method, shape
from runs import Workers
from tasks import GPT
from torch import nn

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.report import compact, describe, machine

D, M = 4, 16
RATES = {"AdamW, beta1 0.9": 0.002, "Muon": 0.004}
METHODS = (
    Method("1f1b", D, M),
    Method("2bw_fresh", D, M, feedback=True),
    Method("2bw", D, M),
    Method("2bw_fresh", D, M),
    Method("2bw", D, M, feedback=True),
)
MOST_BYTES = 128 * 2**20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model, its batches and the held-out ones."""

    layers: int = 8
    width: int = 256
    context: int = 256
    rows: int = 256
    num_held_out: int = 1024


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run."""

    optimizer: str
    method: Method
    learning_rate: float
    seed: int
    num_batches: int
    device: str
    sizes: Sizes = Sizes()

    @property
    def key(self) -> str:
        """All that decides the run's losses."""
        return json.dumps({**dataclasses.asdict(self), "torch": torch.__version__})


@dataclasses.dataclass
class Result:
    """What came out; ``losses`` are held out, in nats per byte, after equal parts of the run."""

    optimizer: str
    method: str
    learning_rate: float
    seed: int
    losses: list[float]
    seconds: float


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


def batches(text: torch.Tensor, rows: int, context: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows of one byte more than the context, int64 [rows, context + 1], without end."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - context - 1, (rows, 1), generator=generator)
        yield text[starts.to(text.device) + offsets].long()


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy in nats per byte, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def train(wanted: Wanted) -> Result:
    warnings.filterwarnings("ignore", message=".*its gradients are late")
    sizes, method, device = wanted.sizes, wanted.method, torch.device(wanted.device)
    torch.manual_seed(wanted.seed)
    model = GPT(num_layers=sizes.layers, width=sizes.width, num_heads=4, context=sizes.context).to(
        device
    )
    text = sources().to(device)
    held_out = text[: len(text) // 20]
    after = next(batches(held_out, sizes.num_held_out, sizes.context, seed=0))
    drawn = batches(text[len(held_out) :], sizes.rows, sizes.context, wanted.seed)
    looks = {round((i + 1) * wanted.num_batches / NUM_LOOKS) for i in range(NUM_LOOKS)}
    losses: list[float] = []
    with pd2.PipelineModule(
        model,
        loss_fn,
        num_stages=method.num_stages,
        num_microbatches=method.num_microbatches,
        schedule=method.schedule,
        precision="bf16",
        graphs="auto" if device.type == "cuda" else False,
        example_args=(after[: sizes.rows, :-1],),
    ) as pipe:
        opt = optimizer_of(wanted, model, pipe)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: shape(t / wanted.num_batches))
        began = time.perf_counter()
        for batch, windows in zip(range(1, wanted.num_batches + 1), drawn, strict=False):
            pipe.train_step(windows[:, :-1], target=windows[:, 1:])
            opt.step()
            scheduler.step()
            if batch in looks:
                losses.append(held_out_loss(pipe, after.split(sizes.rows)))
    return Result(
        wanted.optimizer,
        method.name,
        wanted.learning_rate,
        wanted.seed,
        losses,
        round(time.perf_counter() - began, 1),
    )


@torch.no_grad()
def held_out_loss(pipe: pd2.PipelineModule, parts: Sequence[torch.Tensor]) -> float:
    found = [float(pipe.eval_step(part[:, :-1], target=part[:, 1:])) for part in parts]
    return round(sum(found) / len(found), 6)


def optimizer_of(
    wanted: Wanted, model: nn.Module, pipe: pd2.PipelineModule
) -> pd2.PipelineOptimizer:
    """As in late_forwards.py, AdamW by the fused pass."""
    inner = {
        name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2
    }
    if wanted.optimizer != "Muon":
        inner = set()
    named = list(pipe.named_parameters())
    rest = [p for name, p in named if name not in inner]
    options: dict[str, Any] = {"lr": wanted.learning_rate, "weight_decay": WEIGHT_DECAY}
    wrapped: list[torch.optim.Optimizer] = []
    if inner:
        matrices = [p for name, p in named if name in inner]
        wrapped.append(
            torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options)
        )
    wrapped.append(torch.optim.AdamW(rest, betas=(0.9, BETA2), **options))
    remedies = pd2.ErrorFeedback() if wanted.method.feedback else ()
    return pd2.PipelineOptimizer(*wrapped, staleness=remedies)


def line(wanted: Wanted, result: Result) -> str:
    return (
        f"{result.optimizer:20} {result.method:40} {result.learning_rate:<6g} "
        f"seed {result.seed:<4} {result.losses[-1]:.4f}  {result.seconds:.0f} s"
    )


@dataclasses.dataclass
class Row:
    """A method's held-out losses at the end over those without a delay, in percent, by seed."""

    optimizer: str
    method: str
    learning_rate: float
    losses: list[float]
    over: list[float]


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Of the seeds that synchronous training has, too."""
    found: dict[tuple[str, float, str], dict[int, float]] = {}
    for each in results:
        of = each.optimizer, each.learning_rate, each.method
        found.setdefault(of, {})[each.seed] = each.losses[-1]
    rows = []
    for (optimizer, rate, method), losses in found.items():
        reference = found.get((optimizer, rate, METHODS[0].name), {})
        seeds = [seed for seed in losses if seed in reference]
        over = [round(100 * (losses[seed] / reference[seed] - 1), 3) for seed in seeds]
        rows.append(Row(optimizer, method, rate, [losses[seed] for seed in seeds], over))
    return rows


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = ["| optimizer, learning rate | method | held-out loss | over synchronous |"]
    lines.append("|---|---|---:|---:|")
    for row in rows:
        losses = ", ".join(f"{loss:.4f}" for loss in row.losses)
        over = ", ".join(f"{each:+.2f} %" for each in row.over)
        name = f"{row.optimizer}, {row.learning_rate:g}"
        lines.append(f"| {name} | {row.method} | {losses} | {over} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of the optimizer's own")
    parser.add_argument("--methods", type=int, default=len(METHODS), help="so many first ones")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kept", type=Path, metavar="PATH", help="what runs gave, as they end")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there")
    parser.add_argument("--smoke", action="store_true", help="quick: the figures mean nothing")
    options = parser.parse_args()
    sizes = Sizes()
    if options.smoke:
        sizes, options.batches, options.only = Sizes(4, 16, 8, 16, 16), NUM_LOOKS, ["Muon"]
        options.device = "cpu"
    where = machine()
    print(describe(where), flush=True)
    wanted = [
        Wanted(name, method, rate, seed, options.batches, options.device, sizes)
        for seed, name in itertools.product(range(options.seeds), options.only)
        for rate in options.rates or [RATES[name]]
        for method in METHODS[: options.methods]
    ]
    with Workers(train, Result, line, jobs=options.jobs, kept=options.kept) as workers:
        results = workers.run_all(wanted)
    rows = rows_of(results)
    print(f"\n{table(rows)}")
    if options.json is not None:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where,
            "batches": options.batches,
            "sizes": dataclasses.asdict(sizes),
            "rows": [dataclasses.asdict(row) for row in rows],
            "runs": [dataclasses.asdict(each) for each in results],
        }
        options.json.write_text(compact(report))


if __name__ == "__main__":
    main()
