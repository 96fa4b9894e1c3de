"""Which optimizer stands the delay of 2BW: a small GPT on the sources of Python's library.

    python benchmarks/convergence/which_optimizer.py [--budget MINUTES] [--jobs 2] [--smoke]
        [--seeds 3] [--batches 400] [--layers 3] [--width 128] [--context 64] [--rows 16]
        [--only NAME] [--also NAME=MODULE:CLASS] [--runs PATH] [--json PATH] [--pictures FOLDER]

AdamW with three averages, NAdamW and Muon are trained synchronously (``1f1b``), with 2BW, and with
2BW and each remedy: on the same batches, from the same weights, with the learning rate that is best
without the delay. The loss on held-out text is compared at equal tokens, and the time to an equal
loss with 1F1B's. ``--budget`` measures the time of a batch and trains as many as fit.

``--also SOAP=pytorch_optimizer:SOAP`` adds any optimizer that takes parameters and ``lr``.

``--only`` trains one of them, and may be repeated. ``--runs PATH`` keeps each run there when it
ends, a line of JSON, and does not repeat those that it finds: a study that was cut off goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from runs import Workers, reached
from study import SEED_OF_GRID, Method, shape
from tasks import Task, byte_gpt
from torch import nn

import pipedream2bw as pd2

from measuring.report import compact, describe, machine  # isort: skip  # study.py says where

NUM_LOOKS = 20  # at the held-out loss, in a run
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
BETA2, WEIGHT_DECAY = 0.99, 0.01
BOUND = 0.005  # of the synchronous loss: the claim that is held or refuted
SIZES = ((4, 4), (4, 8), (8, 8))  # stages and microbatches, for the time to equal loss
SYNCHRONOUS = Method("synchronous", schedule="1f1b")

Make = Callable[[Task, list[tuple[str, nn.Parameter]], float], list[torch.optim.Optimizer]]


def methods(num_batches: int) -> list[Method]:
    return [
        SYNCHRONOUS,
        Method("2bw"),
        Method("2bw, warm-up", warmup_batches=num_batches // 10),
        Method("2bw, error feedback", staleness=(pd2.ErrorFeedback(),)),
    ]


def adamw(parameters: Sequence[nn.Parameter], lr: float, beta1: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        list(parameters), lr=lr, betas=(beta1, BETA2), weight_decay=WEIGHT_DECAY
    )


def only_adamw(
    beta1: float, task: Task, named: list[tuple[str, nn.Parameter]], lr: float
) -> list[torch.optim.Optimizer]:
    return [adamw([p for _, p in named], lr, beta1)]


def nadamw(
    task: Task, named: list[tuple[str, nn.Parameter]], lr: float
) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.NAdam(
            [p for _, p in named],
            lr=lr,
            betas=(0.98, BETA2),
            weight_decay=WEIGHT_DECAY,
            decoupled_weight_decay=True,
        )
    ]


def muon(
    task: Task, named: list[tuple[str, nn.Parameter]], lr: float
) -> list[torch.optim.Optimizer]:
    inner = [p for name, p in named if p.dim() == 2 and task.is_inner(name)]
    of_muon = set(map(id, inner))
    # Its steps have the size of AdamW's: one learning rate for both.
    first = torch.optim.Muon(
        inner, lr=lr, momentum=0.95, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [first, adamw([p for _, p in named if id(p) not in of_muon], lr, 0.9)]


def from_elsewhere(
    where: str, task: Task, named: list[tuple[str, nn.Parameter]], lr: float
) -> list[torch.optim.Optimizer]:
    module, _, kind = where.partition(":")
    return [getattr(importlib.import_module(module), kind)([p for _, p in named], lr=lr)]


def optimizers(also: Sequence[str]) -> dict[str, Make]:
    made: dict[str, Make] = {
        f"AdamW, beta1 {beta1}": functools.partial(only_adamw, beta1) for beta1 in (0.9, 0.95, 0.98)
    }
    made["NAdamW, beta1 0.98"] = nadamw
    made["Muon"] = muon
    for given in also:
        name, _, where = given.partition("=")
        made[name] = functools.partial(from_elsewhere, where)
    return made


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    layers: int
    width: int
    context: int
    rows: int

    @functools.cached_property
    def task(self) -> Task:
        return byte_gpt(
            self.rows, self.context, layers=self.layers, width=self.width, num_held_out=128
        )


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run."""

    sizes: Sizes
    optimizer: str
    method: Method
    learning_rate: float
    seed: int
    num_batches: int
    also: tuple[str, ...]

    @property
    def key(self) -> str:
        """All that decides the run's losses."""
        mine = [given for given in self.also if given.partition("=")[0] == self.optimizer]
        kept = {**dataclasses.asdict(self), "method": repr(self.method), "also": mine}
        return json.dumps({**kept, "torch": torch.__version__})


@dataclasses.dataclass
class Result:
    """What came out; ``losses`` are held out, after equal parts of the run."""

    task: str
    optimizer: str
    method: str
    learning_rate: float
    seed: int
    losses: list[float]
    seconds_of_batch: float
    seconds: float
    """Of the processor, for the whole run with its looks at the held-out loss."""

    @property
    def final_loss(self) -> float:
        """Infinite where training diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def train(wanted: Wanted) -> Result:
    """Trains from weights and on batches that the seed alone decides."""
    warnings.filterwarnings("ignore", ".*which_optimizer")  # it is what the study is about
    torch.set_num_threads(1)
    began = time.process_time()
    torch.manual_seed(wanted.seed)
    task, method = wanted.sizes.task, wanted.method
    batches = task.batches(wanted.seed)
    looks = {round((i + 1) * wanted.num_batches / NUM_LOOKS) for i in range(NUM_LOOKS)}
    losses, seconds = [], 0.0
    with pd2.PipelineModule(
        task.build(),
        task.loss_fn,
        num_stages=1,
        num_microbatches=1,
        schedule=method.schedule,
        warmup_batches=method.warmup_batches,
        example_args=task.held_out[:1],
    ) as pipe:
        make = optimizers(wanted.also)[wanted.optimizer]
        opt = pd2.PipelineOptimizer(
            *make(task, list(pipe.named_parameters()), wanted.learning_rate),
            staleness=method.staleness,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: shape(t / wanted.num_batches))
        for batch in range(1, wanted.num_batches + 1):
            start = time.perf_counter()
            tokens, target = next(batches)
            pipe.train_step(tokens, target=target)
            opt.step()
            scheduler.step()
            if batch in looks:
                pipe.flush()
            seconds += time.perf_counter() - start
            if batch in looks:
                pipe.eval()
                losses.append(float(task.loss_fn(pipe(task.held_out[0]), task.held_out[1])))
                pipe.train()
    return Result(
        task.name,
        wanted.optimizer,
        method.name,
        wanted.learning_rate,
        wanted.seed,
        losses,
        seconds / wanted.num_batches,
        time.process_time() - began,
    )


def main() -> None:
    options = parse_options()
    sizes = Sizes(options.layers, options.width, options.context, options.rows)
    also = tuple(options.also)
    names = options.only or list(optimizers(also))
    where = machine()
    print(describe(where), flush=True)
    num_runs = len(names) * (len(methods(0)) * options.seeds + len(options.rates))
    with Workers(train, Result, line, jobs=options.jobs, kept=options.runs) as workers:
        run_all = workers.run_all
        if options.budget is not None:
            options.batches = batches_within(options, sizes, names, run_all)
        print(
            f"{num_runs} runs of {options.batches} batches of {sizes.rows * sizes.context} bytes",
            flush=True,
        )

        def wanted(name: str, method: Method, rate: float, seed: int) -> Wanted:
            return Wanted(sizes, name, method, rate, seed, options.batches, also)

        grid = run_all(
            [
                wanted(name, SYNCHRONOUS, rate, SEED_OF_GRID)
                for name in names
                for rate in options.rates
            ]
        )
        rates = {
            name: min((r for r in grid if r.optimizer == name), key=lambda r: r.final_loss)
            for name in names
        }
        results = run_all(
            [
                wanted(name, method, rates[name].learning_rate, seed)
                for name in names
                for method in methods(options.batches)
                for seed in range(options.seeds)
            ]
        )
    minutes = sum(result.seconds for result in (*grid, *results)) / 60
    print(f"\n{table(results)}\n\n{num_runs} runs in {minutes:.1f} minutes of a core")
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": where,
        "minutes": round(minutes, 1),
        "measure": "held-out loss",
        "batches": options.batches,
        "window": options.batches / NUM_LOOKS,
        "sizes": dataclasses.asdict(sizes),
        "grid": list(map(as_json, grid)),
        "results": list(map(as_json, results)),
    }
    if options.json is not None:
        options.json.write_text(compact(report))
    if options.pictures is not None:
        from pictures import draw

        draw(report, options.pictures, "which_optimizer")


def line(wanted: Wanted, result: Result) -> str:
    return (
        f"{result.optimizer:20} {result.method:32} {result.learning_rate:<6g} "
        f"seed {result.seed:<4} {result.final_loss:.4f}"
    )


def batches_within(
    options: argparse.Namespace,
    sizes: Sizes,
    names: Sequence[str],
    run_all: Callable[[Sequence[Wanted]], list[Result]],
) -> int:
    """How many batches a run may have, so that all runs take ``--budget``."""
    start = time.perf_counter()
    also, rate = tuple(options.also), options.rates[0]
    tried = run_all(
        [Wanted(sizes, name, SYNCHRONOUS, rate, SEED_OF_GRID, NUM_LOOKS, also) for name in names]
    )
    taken = time.perf_counter() - start
    of_one = len(methods(0)) * options.seeds + len(options.rates)
    seconds = sum(result.seconds_of_batch for result in tried) * of_one / options.jobs
    left = 0.9 * (60 * options.budget - taken)  # a tenth for looks, and for what is between
    return max(2 * NUM_LOOKS, int(left / seconds))


def table(results: Sequence[Result]) -> str:
    """In Markdown: losses at equal tokens, and times to equal loss."""
    speeds = [f"{d} stages, {m} microbatches" for d, m in SIZES]
    lines = [
        "| optimizer, learning rate | method | held-out loss | against synchronous | "
        + " | ".join(f"speed at equal loss: {speed}" for speed in speeds)
        + " |",
        "|---|---|---|---|" + "---|" * len(speeds),
    ]
    for name in dict.fromkeys(result.optimizer for result in results):
        mine = [result for result in results if result.optimizer == name]
        synchronous = [r for r in mine if r.method == SYNCHRONOUS.name]
        for method in dict.fromkeys(r.method for r in mine):
            runs = [r for r in mine if r.method == method]
            title = f"{name}, {runs[0].learning_rate:g}" if method == SYNCHRONOUS.name else ""
            lines.append(f"| {title} | {method} | " + " | ".join(cells(runs, synchronous)) + " |")
    return "\n".join(lines)


def cells(runs: Sequence[Result], synchronous: Sequence[Result]) -> list[str]:
    finals = [result.final_loss for result in runs]
    if not all(map(math.isfinite, finals)):
        return ["diverged"] + ["-"] * (1 + len(SIZES))
    deviation = statistics.stdev(finals) if len(finals) > 1 else 0.0
    loss = f"{statistics.fmean(finals):.4f} ± {deviation:.4f}"
    if runs[0].method == SYNCHRONOUS.name:
        return [loss, "", *["1"] * len(SIZES)]
    gaps = [
        mine.final_loss / its.final_loss - 1 for mine, its in zip(runs, synchronous, strict=True)
    ]
    gap = statistics.fmean(gaps)
    held = "within" if gap <= BOUND else "beyond"
    against = f"{100 * gap:+.2f} % ({held} {100 * BOUND:g} %)"
    slower = statistics.fmean(
        batches_ratio(mine.losses, its.losses) for mine, its in zip(runs, synchronous, strict=True)
    )
    return [loss, against, *(f"{(m + d - 1) / m / slower:.2f}" for d, m in SIZES)]


def batches_ratio(mine: Sequence[float], synchronous: Sequence[float]) -> float:
    """Batches until a loss that both reach, over the synchronous run's.

    It is the higher one of the two final losses. 1F1B's batch takes (m + d - 1) / m of 2BW's.
    """
    loss = max(mine[-1], synchronous[-1])
    return reached(mine, loss) / reached(synchronous, loss)


def as_json(result: Result) -> dict[str, Any]:
    """Infinities and NaNs, for which JSON has no word, as None."""
    losses = [round(loss, 5) if math.isfinite(loss) else None for loss in result.losses]
    seconds = {
        "seconds_of_batch": round(result.seconds_of_batch, 5),
        "seconds": round(result.seconds, 1),
    }
    return {**dataclasses.asdict(result), "losses": losses, **seconds}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs of each kind")
    add("--batches", type=int, default=400, help="of a run")
    add("--budget", type=float, metavar="MINUTES", help="as many batches as all runs fit there")
    add("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    add("--layers", type=int, default=3)
    add("--width", type=int, default=128)
    add("--context", type=int, default=64, help="bytes in a row")
    add("--rows", type=int, default=16, help="of a batch")
    add("--also", action="append", default=[], metavar="NAME=MODULE:CLASS", help="an optimizer")
    add("--only", action="append", metavar="NAME", help="of all optimizers, those so named")
    add("--smoke", action="store_true", help="quick: the losses mean nothing")
    add("--runs", type=Path, metavar="PATH", help="keep each run there, repeat none that is there")
    add("--json", type=Path, metavar="PATH", help="write the results there")
    add("--pictures", type=Path, metavar="FOLDER", help="draw them there")
    options = parser.parse_args()
    known = optimizers(options.also)
    for name in options.only or ():
        if name not in known:
            parser.error(f"--only: {name}, known are {'; '.join(known)}")
    options.rates = LEARNING_RATES
    if options.smoke:
        options.seeds, options.batches, options.budget = 1, NUM_LOOKS, None
        options.layers, options.width, options.context, options.rows = 1, 32, 16, 4
        options.rates = LEARNING_RATES[:1]
    return options


if __name__ == "__main__":
    main()
