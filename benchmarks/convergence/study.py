"""What the delay of 2BW, and each remedy for it, does to the loss.

    python benchmarks/convergence/study.py [--seeds 3] [--batches 200] [--smoke]
        [--json PATH] [--pictures FOLDER]

Trains a small GPT over bytes and a network for the digits by SGD with momentum, AdamW and Muon:
synchronously, with 2BW, and with 2BW and each remedy, on the same batches from the same weights.
Which version a batch reads does not depend on the number of stages: every pipeline has one, so that
a run is short. README.md beside this file says what came out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tasks import Task, byte_gpt, digits

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.report import compact, describe, machine

OPTIMIZERS = ("SGD", "AdamW", "Muon")
WINDOW = 20  # batches whose losses are averaged
SEED_OF_GRID = 100  # for choosing the learning rate; none of the study's


@dataclasses.dataclass(frozen=True)
class Method:
    """How to train: a schedule, and what is done about its delay."""

    name: str
    schedule: str = "2bw"
    warmup_batches: int = 0
    staleness: tuple[Any, ...] = ()
    momentum: float = 0.9  # of the optimizer itself
    of_pipeline: dict[str, Any] = dataclasses.field(default_factory=dict)  # further options
    loss_scale: pd2.LossScale | None = None


def methods(num_batches: int) -> list[Method]:
    discount = pd2.LearningRateDiscount(max(1, num_batches // 4))
    return [
        Method("synchronous", schedule="1f1b"),
        Method("2bw"),
        Method("2bw, warm-up", warmup_batches=num_batches // 10),
        Method("2bw, learning-rate discount", staleness=(discount,)),
        Method("2bw, error feedback", staleness=(pd2.ErrorFeedback(),)),
        # In the place of the optimizer's momentum, not on top of it.
        Method("2bw, Nesterov correction", staleness=(pd2.NesterovCorrection(0.9),), momentum=0.0),
    ]


@dataclasses.dataclass
class Result:
    """One run. ``losses``: means over WINDOW batches, from the beginning to the end."""

    task: str
    optimizer: str
    method: str
    learning_rate: float
    seed: int
    losses: list[float]
    held_out_loss: float
    held_out_accuracy: float

    @property
    def final_loss(self) -> float:
        """Of the last WINDOW batches; infinite where training diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    start = time.perf_counter()
    seeds = range(options.seeds)
    results: list[Result] = []
    grid: list[Result] = []
    for task in (digits(), byte_gpt()):
        for optimizer in OPTIMIZERS:
            synchronous, delayed, *_ = methods(options.batches)
            rates = task.learning_rates[optimizer]
            tried = [
                run(task, optimizer, method, rate, SEED_OF_GRID, options.batches)
                for method in (synchronous, delayed)
                for rate in (rates[:1] if options.smoke else rates)
            ]
            grid += tried
            # What is best without the delay, and what is best with it, if that is another.
            for rate in dict.fromkeys(best_rate(tried, each) for each in (synchronous, delayed)):
                print(f"\n{task.name}, {optimizer}, learning rate {rate:g}")
                for method in methods(options.batches):
                    mine = [run(task, optimizer, method, rate, s, options.batches) for s in seeds]
                    results += mine
                    print("  " + row(mine), flush=True)
    minutes = (time.perf_counter() - start) / 60
    print(f"\n{len(results) + len(grid)} runs in {minutes:.1f} minutes")
    report = {
        "command": f"python benchmarks/convergence/study.py --seeds {options.seeds} "
        f"--batches {options.batches}",
        "machine": where,
        "minutes": round(minutes, 1),
        "window": WINDOW,
        "grid": [as_json(result) for result in grid],
        "results": [as_json(result) for result in results],
    }
    if options.json is not None:
        options.json.write_text(compact(report))
    if options.pictures is not None:
        from pictures import draw

        draw(report, options.pictures)


def parse_options(description: str = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=200, help="of a run; default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="quick: the losses mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw them there")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.batches = 1, WINDOW
    return options


def run(
    task: Task, optimizer: str, method: Method, learning_rate: float, seed: int, num_batches: int
) -> Result:
    """Trains from weights and on batches that the seed alone decides."""
    torch.manual_seed(seed)
    batches = task.batches(seed)
    model = task.build()
    losses = []
    with pd2.PipelineModule(
        model,
        lambda output, target: task.loss_fn(output.float(), target),
        schedule=method.schedule,
        warmup_batches=method.warmup_batches,
        example_args=task.held_out[:1],
        **{"num_stages": 1, "num_microbatches": 1, **method.of_pipeline},
    ) as pipe:
        wrapped = make_optimizers(task, optimizer, pipe, learning_rate, method.momentum)
        opt = pd2.PipelineOptimizer(
            *wrapped, staleness=method.staleness, loss_scale=method.loss_scale
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: shape(t / num_batches))
        for _ in range(num_batches):
            tokens, target = next(batches)
            losses.append(pipe.train_step(tokens, target=target))
            opt.step()
            scheduler.step()
        numbers = [float(loss) for loss in losses]
        pipe.eval()
        output = pipe(task.held_out[0]).float()
        held_out = float(task.loss_fn(output, task.held_out[1]))
        right = (output.argmax(-1) == task.held_out[1]).float().mean()
    windows = [numbers[i : i + WINDOW] for i in range(0, num_batches, WINDOW)]
    means = [statistics.fmean(window) for window in windows]
    return Result(
        task.name, optimizer, method.name, learning_rate, seed, means, held_out, float(right)
    )


def make_optimizers(
    task: Task, name: str, pipe: pd2.PipelineModule, learning_rate: float, momentum: float
) -> list[torch.optim.Optimizer]:
    named = list(pipe.named_parameters())
    if name == "SGD":
        # Its momentum of 0.9 makes steps ten times as long, which the others' do not.
        rate = learning_rate * (10 if momentum == 0 else 1)
        return [torch.optim.SGD(pipe.parameters(), lr=rate, momentum=momentum)]

    def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=learning_rate, betas=(momentum, 0.99), weight_decay=0.01
        )

    if name == "AdamW":
        return [adamw([parameter for _, parameter in named])]
    inner = [p for n, p in named if p.dim() == 2 and task.is_inner(n)]
    of_muon = {id(parameter) for parameter in inner}
    # Its steps have the size of AdamW's: one learning rate for both.
    muon = torch.optim.Muon(
        inner,
        lr=learning_rate,
        momentum=momentum,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adamw([p for _, p in named if id(p) not in of_muon])]


def shape(done: float) -> float:
    """Of the learning rate: up over the first twentieth, then down to a tenth."""
    return min(1.0, 20 * done + 0.05) * (1 - 0.9 * done)


def best_rate(tried: list[Result], method: Method) -> float:
    mine = [result for result in tried if result.method == method.name]
    return min(mine, key=lambda result: result.final_loss).learning_rate


def row(mine: list[Result]) -> str:
    """A line of the table: mean and standard deviation over the seeds."""

    def cell(values: list[float]) -> str:
        if not all(map(math.isfinite, values)):
            return "diverged".ljust(15)
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.fmean(values):.4f} ± {deviation:.4f}"

    final = cell([result.final_loss for result in mine])
    held_out = cell([result.held_out_loss for result in mine])
    return f"{mine[0].method:28} training {final}   held out {held_out}"


def as_json(result: Result) -> dict[str, Any]:
    """Infinities and NaNs, for which JSON has no word, as None."""

    def number(value: float) -> float | None:
        return round(value, 5) if math.isfinite(value) else None

    fields = dataclasses.asdict(result)
    return {
        **fields,
        "losses": [number(loss) for loss in result.losses],
        "held_out_loss": number(result.held_out_loss),
        "held_out_accuracy": number(result.held_out_accuracy),
    }


if __name__ == "__main__":
    main()
