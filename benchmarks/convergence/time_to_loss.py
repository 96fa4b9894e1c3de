"""Time to an equal loss on two processes: schedules without a bubble against 1F1B.

    python benchmarks/convergence/time_to_loss.py [--seeds 3] [--json PATH] [--picture PATH]
        [--smoke]

The pipeline itself trains the byte GPT of late_forwards.py in two stages, a process each, with m =
2d and 4d microbatches: AdamW and Muon, at the learning rates that are best without a delay. A seed
decides the weights and the batches, and its runs follow one another. The clock stands while the
held-out loss is computed. For each seed take the higher one of the two losses at the end: the time
until both have it is compared. 20 minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from late_forwards import (
    DECISIVE,
    NUM_LOOKS,
    OPTIMIZERS,
    SYNCHRONOUS,
    Method,
    Sizes,
    held_out_loss,
    pace,
    shape,
    task_of,
)
from tasks import Task
from torch import nn

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.ranks import run_on_ranks
from measuring.report import compact, describe, machine

RATES = {"AdamW, beta1 0.9": 0.004, "Muon": 0.016}  # as late_forwards.py short finds them
D = 2


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    method: Method
    seed: int
    num_batches: int
    sizes: Sizes


@dataclasses.dataclass
class Curve:
    """Held-out losses after equal parts of a run of so many seconds."""

    losses: list[float]
    seconds: float


def train(rank: int, world_size: int, runs: list[Run]) -> list[Curve]:
    """Makes the runs one after the other; rank 0's losses count."""
    warnings.filterwarnings("ignore", message=".*its gradients are late")
    return [_train(rank, run) for run in runs]


def _train(rank: int, run: Run) -> Curve:
    torch.manual_seed(run.seed)
    task, method = task_of(run.sizes), run.method
    batches = task.batches(run.seed)
    looks = {round((i + 1) * run.num_batches / NUM_LOOKS) for i in range(NUM_LOOKS)}
    curve = Curve([], 0.0)
    with pd2.PipelineModule(
        task.build(),
        task.loss_fn,
        num_stages=D,
        num_microbatches=method.num_microbatches,
        schedule=method.schedule,
        example_args=(task.held_out[0][: run.sizes.rows],),
    ) as pipe:
        opt = _optimizer(run, task, pipe)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: shape(t / run.num_batches))
        begun = _now()
        for batch in range(1, run.num_batches + 1):
            tokens, target = next(batches)
            pipe.train_step(tokens, target=target)
            opt.step()
            scheduler.step()
            if batch in looks:
                pipe.flush()
                curve.seconds += _now() - begun
                weights = pipe.full_state_dict()
                if rank == 0:
                    curve.losses.append(_loss(task, weights))
                begun = _now()
    return curve


def _optimizer(run: Run, task: Task, pipe: pd2.PipelineModule) -> pd2.PipelineOptimizer:
    wrapped = OPTIMIZERS[run.optimizer](task, list(pipe.named_parameters()), RATES[run.optimizer])
    return pd2.PipelineOptimizer(
        *wrapped, staleness=pd2.ErrorFeedback() if run.method.feedback else ()
    )


def _loss(task: Task, weights: dict[str, torch.Tensor]) -> float:
    whole: nn.Module = task.build()
    whole.load_state_dict(weights)
    return held_out_loss(task, whole)


def _now() -> float:
    """Once both processes are here."""
    dist.barrier()
    return time.perf_counter()


def methods(m: int) -> list[Method]:
    """The one without a delay first."""
    return [
        dataclasses.replace(SYNCHRONOUS, num_stages=D, num_microbatches=m),
        Method("2bw", D, m, feedback=True),
        Method("2bw_fresh", D, m),
        Method("2bw_fresh", D, m, feedback=True),
    ]


@dataclasses.dataclass
class Row:
    """A method against 1F1B, means of the seeds and their deviations.

    Attributes:
        throughput: batches a second over 1F1B's.
        pace: 1F1B's batches until an equal loss over its own.
        speed: 1F1B's seconds until an equal loss over its own: the product of both.
    """

    optimizer: str
    method: str
    num_microbatches: int
    loss: float
    over: float
    throughput: float
    pace: float
    speed: float
    deviation: float


def rows_of(runs: list[Run], curves: list[Curve]) -> list[Row]:
    found = dict(zip(runs, curves, strict=True))
    groups: dict[tuple[str, Method], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.optimizer, run.method), []).append(run)
    rows = []
    for (optimizer, method), mine in groups.items():
        first = methods(method.num_microbatches)[0]
        pairs = [(found[run], found[dataclasses.replace(run, method=first)]) for run in mine]
        faster = [other.seconds / own.seconds for own, other in pairs]
        paces = [pace(own.losses, other.losses) for own, other in pairs]
        speeds = [a * b for a, b in zip(faster, paces, strict=True)]
        rows.append(
            Row(
                optimizer,
                method.name if method.schedule != "1f1b" else "1f1b",
                method.num_microbatches,
                statistics.fmean(own.losses[-1] for own, _ in pairs),
                statistics.fmean(100 * (a.losses[-1] / b.losses[-1] - 1) for a, b in pairs),
                statistics.fmean(faster),
                statistics.fmean(paces),
                statistics.fmean(speeds),
                statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [
        "| optimizer | method | m | held-out loss | over 1F1B | throughput | pace to equal loss | "
        "speed to equal loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.optimizer} | {row.method} | {row.num_microbatches} | {row.loss:.4f} | "
        f"{row.over:+.2f} % | {row.throughput:.2f} | {row.pace:.3f} | "
        f"{row.speed:.2f} ± {row.deviation:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(runs: list[Run], curves: list[Curve], path: Path) -> None:
    """Held-out losses by time with the most microbatches, means of the seeds."""
    from matplotlib.figure import Figure
    from pictures import COLOURS

    most = max(run.method.num_microbatches for run in runs)
    groups: dict[str, dict[str, list[Curve]]] = {}
    for run, curve in zip(runs, curves, strict=True):
        if run.method.num_microbatches == most:
            of_optimizer = groups.setdefault(run.optimizer, {})
            name = run.method.name if run.method.schedule != "1f1b" else "1f1b"
            of_optimizer.setdefault(name, []).append(curve)
    figure = Figure(figsize=(4.5 * len(groups), 4), layout="constrained", dpi=80)
    for axes, (optimizer, methods) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        for (name, seeds), colour in zip(methods.items(), COLOURS, strict=False):
            seconds = statistics.fmean(curve.seconds for curve in seeds)
            losses = [statistics.fmean(of) for of in zip(*(c.losses for c in seeds), strict=True)]
            times = [seconds * (i + 1) / len(losses) for i in range(len(losses))]
            axes.plot(times, losses, color=colour, linewidth=1.5, label=name)
        axes.set(title=f"{optimizer}, m = {most}", xlabel="seconds", ylabel="held-out loss")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw losses by time there")
    parser.add_argument("--smoke", action="store_true", help="quick: the figures mean nothing")
    options = parser.parse_args()
    sizes, num_batches, optimizers = Sizes(), 400, DECISIVE
    if options.smoke:
        sizes, num_batches, optimizers = Sizes(3, 16, 16, 32, 32), NUM_LOOKS, DECISIVE[:1]
        options.seeds = 1
    where = machine()
    print(describe(where), flush=True)
    runs = [
        Run(optimizer, method, seed, num_batches, sizes)
        for optimizer in optimizers
        for m in ((4 * D,) if options.smoke else (4 * D, 2 * D))
        for seed in range(options.seeds)
        for method in methods(m)
    ]
    curves = run_on_ranks(D, train, runs)[0]
    rows = rows_of(runs, curves)
    print(f"\n{table(rows)}")
    if options.json is not None:
        report: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where,
            "batches": num_batches,
            "seeds": options.seeds,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.json.write_text(compact(report))
    if options.picture is not None:
        draw(runs, curves, options.picture)


if __name__ == "__main__":
    main()
