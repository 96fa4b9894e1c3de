"""What late forwards cost in loss, by optimizer, schedule and remedy: a small GPT over bytes.

    python benchmarks/convergence/late_forwards.py {short,seeds,remedies,long,sample} [--only NAME]
        [--passes N] [--jobs 1] [--kept PATH] [--json PATH] [--pictures FOLDER] [--smoke]

Runs of one optimizer have the same batches and the same first weights, which the seed decides.
``short`` has 400 batches at rates of a ladder of factor 2: the best one without a delay, and half
and twice that. ``seeds`` tells with more seeds how AdamW ends with m = 4d, and what coefficient
``ErrorFeedback`` should have. ``remedies`` tries other coefficients, a warm-up, newer
preconditioners and other stages' forwards late where ``short`` falls short. ``long`` has 20 tokens
per parameter, at the rate that is best without a delay. ``sample`` trains some of the runs by the
pipeline itself, and by both ways of the emulation.

What a run gave is a line of ``--kept``, written when it ends. A study that was cut off goes on
where it was. README.md beside this has the studies' times.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from emulated import Emulated, late_forwards
from runs import Workers, reached
from tasks import Task, byte_gpt
from torch import nn

import pipedream2bw as pd2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measuring.report import compact, describe, machine

NUM_LOOKS = 20  # at the held-out loss, in a run
BETA2, WEIGHT_DECAY = 0.99, 0.01

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Task, Named, float], list[torch.optim.Optimizer]]


class StockAdamW(torch.optim.AdamW):
    """Which the pipeline does not fuse, so that both compute the same bits."""


def adamw(
    beta1: float,
    task: Task,
    named: Named,
    lr: float,
    kind: type[torch.optim.AdamW] = StockAdamW,
) -> list[torch.optim.Optimizer]:
    parameters = [p for _, p in named]
    return [kind(parameters, lr=lr, betas=(beta1, BETA2), weight_decay=WEIGHT_DECAY)]


def nadamw(task: Task, named: Named, lr: float) -> list[torch.optim.Optimizer]:
    options: dict[str, Any] = {"decoupled_weight_decay": True, "weight_decay": WEIGHT_DECAY}
    return [torch.optim.NAdam([p for _, p in named], lr=lr, betas=(0.98, BETA2), **options)]


def muon(
    task: Task, named: Named, lr: float, kind: type[torch.optim.AdamW] = StockAdamW
) -> list[torch.optim.Optimizer]:
    """For the inner matrices; its steps have the size of AdamW's: one learning rate for both."""
    inner = {name: p for name, p in named if p.dim() == 2 and task.is_inner(name)}
    options: dict[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    first = torch.optim.Muon(inner.values(), lr=lr, weight_decay=WEIGHT_DECAY, **options)
    return [first, *adamw(0.9, task, [(n, p) for n, p in named if n not in inner], lr, kind)]


def soap(
    task: Task, named: Named, lr: float, precondition_frequency: int = 10
) -> list[torch.optim.Optimizer]:
    from pytorch_optimizer import SOAP

    parameters = [p for _, p in named]
    return [SOAP(parameters, lr=lr, precondition_frequency=precondition_frequency)]


OPTIMIZERS: dict[str, Make] = {
    "AdamW, beta1 0.9": functools.partial(adamw, 0.9),
    "Muon": muon,
    "AdamW, beta1 0.95": functools.partial(adamw, 0.95),
    "NAdamW, beta1 0.98": nadamw,
    "SOAP": soap,
    "SOAP, newest": functools.partial(soap, precondition_frequency=1),
}
RATE_OF = {"SOAP, newest": "SOAP"}
"""Whose best rate without a delay an optimizer has that is another one but for an option."""
DECISIVE = ("AdamW, beta1 0.9", "Muon")


@dataclasses.dataclass(frozen=True)
class Method:
    """How to train: of "1f1b" and "2bw" the numbers of stages and microbatches do not matter."""

    schedule: str = "1f1b"
    num_stages: int = 1
    num_microbatches: int = 1
    feedback: bool = False
    coefficient: float = 1.0
    warmup_batches: int = 0
    late: tuple[int, ...] = ()
    """How many forwards of a batch are late on each stage, if not as many as under the schedule."""

    @property
    def name(self) -> str:
        sizes = f", d = {self.num_stages}, m = {self.num_microbatches}"
        return (
            {"1f1b": "synchronous"}.get(self.schedule, self.schedule)
            + (sizes if self.schedule == "2bw_fresh" else "")
            + (", error feedback" if self.feedback else "")
            + (f", c = {self.coefficient:g}" if self.coefficient != 1 else "")
            + (f", after {self.warmup_batches} batches" if self.warmup_batches else "")
            + (f", late: {' '.join(map(str, self.late))}" if self.late else "")
        )


SYNCHRONOUS = Method()


def methods(per_stage: Sequence[int]) -> list[Method]:
    """The synchronous one, and those with a delay, with so many microbatches for each stage."""
    sizes = [("2bw", 1, 1), *(("2bw_fresh", d, n * d) for n in per_stage for d in (4, 8))]
    return [SYNCHRONOUS, *(Method(*of, feedback) for of in sizes for feedback in (False, True))]


def remedies() -> list[Method]:
    """What the literature offers beside the plain correction, and that one."""
    plain = [Method("2bw"), Method("2bw_fresh", 4, 4), Method("2bw_fresh", 4, 8)]
    changes: list[dict[str, Any]] = [
        {},
        {"feedback": True},
        {"feedback": True, "coefficient": 0.5},
        {"feedback": True, "coefficient": 1.5},
        {"warmup_batches": 40},
        {"feedback": True, "warmup_batches": 40},
    ]
    return [
        SYNCHRONOUS,
        *(dataclasses.replace(each, **with_) for each in plain for with_ in changes),
    ]


def coefficients() -> list[Method]:
    """Of error feedback where most of each batch is late, and where less is."""
    tried = [(4, 1.0), (4, 1.5), (4, 2.0), (8, 1.5)]
    return [
        SYNCHRONOUS,
        *(Method("2bw_fresh", 4, m, feedback=True, coefficient=c) for m, c in tried),
    ]


def orders() -> list[Method]:
    """Late forwards on one stage alone, and on the stages in the order opposite to a pipeline's."""
    alone = [tuple(4 * (stage == i) for stage in range(4)) for i in range(4)]
    return [SYNCHRONOUS, *(Method("2bw_fresh", 4, 4, late=late) for late in [*alone, (1, 2, 3, 4)])]


@dataclasses.dataclass(frozen=True)
class Pass:
    """Runs that are made before those of the next pass, at so many times the best learning rate."""

    optimizers: Sequence[str]
    methods: Sequence[Method]
    factors: Sequence[float] = (1.0,)
    num_seeds: int = 3


@dataclasses.dataclass(frozen=True)
class Study:
    """What is trained.

    Attributes:
        rates: of which the best one is chosen without a delay.
        seeds_of_grid: for choosing it; none of the study's.
    """

    num_batches: int
    rates: Sequence[float]
    seeds_of_grid: Sequence[int]
    passes: Sequence[Pass]


REST = ("AdamW, beta1 0.95", "NAdamW, beta1 0.98", "SOAP")
LADDER = tuple(0.0005 * 2**i for i in range(7))
STUDIES = {
    "short": Study(
        400,
        LADDER[1:],
        (100, 101, 102),
        [
            Pass(DECISIVE, methods((4, 2))),
            Pass(REST, methods((4, 2))),
            Pass(DECISIVE + REST, methods((4, 2, 1))),
            Pass(DECISIVE, methods((4, 2)), (0.5, 2.0)),
            Pass(REST, methods((4, 2)), (0.5, 2.0)),
            Pass(DECISIVE + REST, methods((1,)), (0.5, 2.0)),
        ],
    ),
    "seeds": Study(
        400,
        LADDER[1:],
        (100, 101, 102),
        [
            Pass(DECISIVE[:1], methods((4,)), num_seeds=9),
            Pass((*DECISIVE, "SOAP"), coefficients(), num_seeds=6),
        ],
    ),
    "remedies": Study(
        400,
        LADDER[1:],
        (100, 101, 102),
        [
            Pass(("SOAP", "NAdamW, beta1 0.98", *DECISIVE), remedies(), num_seeds=2),
            Pass(
                ("SOAP, newest",),
                [*methods((2,)), *(Method("2bw_fresh", 4, 4, fed) for fed in (False, True))],
                num_seeds=2,
            ),
            Pass(("SOAP", "Muon"), orders()),
        ],
    ),
    "long": Study(
        7500,
        LADDER[1:5],
        (100,),
        [
            *(Pass([name], methods((4,)), num_seeds=1) for name in DECISIVE),
            Pass(DECISIVE, methods((4,))),
        ],
    ),
}
DRAWN = [method.name for method in methods((4,)) if method.num_stages in (1, 8)]
SAMPLE = [  # of short, at its rates
    ("AdamW, beta1 0.9", 0.004, Method("2bw_fresh", 4, 16)),
    ("AdamW, beta1 0.9", 0.004, Method("2bw_fresh", 4, 16, feedback=True)),
    ("Muon", 0.016, Method("2bw_fresh", 4, 16)),
    ("Muon", 0.016, Method("2bw_fresh", 4, 16, feedback=True)),
    ("NAdamW, beta1 0.98", 0.004, Method("2bw_fresh", 4, 16, feedback=True)),
    ("SOAP", 0.032, Method("2bw_fresh", 4, 16, feedback=True)),
]
PIPELINE, EMULATED = "pipeline", "emulated"
ONE_BY_ONE = "emulated, microbatch by microbatch"
ROWS_REVERSED = "emulated, rows reversed"
"""The same training but for rounding: how far apart two runs are that nothing tells apart."""
WAYS = (PIPELINE, ONE_BY_ONE, EMULATED)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model, 0.39M parameters, and its batches, which have 32 microbatches at most."""

    layers: int = 3
    width: int = 96
    context: int = 32
    rows: int = 32
    num_held_out: int = 512


@functools.cache
def task_of(sizes: Sizes) -> Task:
    given = dataclasses.asdict(sizes)
    return byte_gpt(given.pop("rows"), given.pop("context"), **given)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One run."""

    optimizer: str
    method: Method
    learning_rate: float
    seed: int
    num_batches: int
    sizes: Sizes = Sizes()
    way: str = EMULATED

    @property
    def key(self) -> str:
        """What decides the run's losses, but for the text, which is Python's own, and the versions
        of other packages than torch. Options of later versions are named if given."""
        decides = {**dataclasses.asdict(self), "torch": torch.__version__}
        for name in ("coefficient", "warmup_batches", "late"):
            if decides["method"][name] == getattr(Method, name):
                del decides["method"][name]
        return json.dumps(decides)


@dataclasses.dataclass
class Result:
    """What came out; ``losses`` are held out, after equal parts of the run."""

    optimizer: str
    method: str
    learning_rate: float
    seed: int
    losses: list[float]
    uncorrected_loss: float | None
    """At the end, at the weights of which error feedback makes plain steps."""
    seconds: float
    """Of the processor."""
    weights: str = ""
    """A digest of their bits at the end."""

    @property
    def final_loss(self) -> float:
        """Infinite where training diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def shape(done: float) -> float:
    """Of the learning rate: up over the first twentieth, then down a cosine to a tenth."""
    if done < 0.05:
        return max(20 * done, 0.05)
    return 0.55 + 0.45 * math.cos(math.pi * (done - 0.05) / 0.95)


def train(wanted: Wanted) -> Result:
    """Trains from weights and on batches that the seed alone decides."""
    torch.set_num_threads(1)
    way = by_pipeline if wanted.way == PIPELINE else by_emulation
    return train_on(task_of(wanted.sizes), wanted, way)


def train_on(task: Task, wanted: Wanted, way: Callable[..., Any]) -> Result:
    """As :func:`train`, the task by a way: :func:`by_pipeline` or another one like it."""
    began = time.process_time()
    torch.manual_seed(wanted.seed)
    model, batches = task.build(), task.batches(wanted.seed)
    looks = {round((i + 1) * wanted.num_batches / NUM_LOOKS) for i in range(NUM_LOOKS)}
    losses: list[float] = []
    with way(wanted, task, model) as (step, opts, trained):
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(opt, lambda t: shape(t / wanted.num_batches))
            for opt in opts
        ]
        for batch in range(1, wanted.num_batches + 1):
            tokens, target = next(batches)
            if wanted.way == ROWS_REVERSED:
                tokens, target = tokens.flip(0), target.flip(0)
            step(tokens, target)
            for scheduler in schedulers:
                scheduler.step()
            if batch in looks:
                losses.append(held_out_loss(task, trained()[0]))
        newest, *uncorrected = trained()
    return Result(
        wanted.optimizer,
        wanted.method.name + ", rows reversed" * (wanted.way == ROWS_REVERSED),
        wanted.learning_rate,
        wanted.seed,
        losses,
        held_out_loss(task, uncorrected[0]) if uncorrected else None,
        round(time.process_time() - began, 1),
        digest(newest),
    )


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module) -> float:
    return round(float(task.loss_fn(model(task.held_out[0]), task.held_out[1])), 6)


def digest(model: nn.Module) -> str:
    """Of the weights' bits."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


Step = Callable[[torch.Tensor, torch.Tensor], object]
Trained = Callable[[], list[nn.Module]]
"""The model at the newest weights, and at those without the correction if there is one."""
Training = Iterator[tuple[Step, Sequence[torch.optim.Optimizer], Trained]]


@contextlib.contextmanager
def by_emulation(wanted: Wanted, task: Task, model: nn.Module) -> Training:
    method = wanted.method
    sizes = method.num_stages, method.num_microbatches
    spare, example = copy.deepcopy(model), example_of(wanted, task)
    emulated = Emulated(
        model,
        task.loss_fn,
        late_forwards(spare, task.loss_fn, example, method.schedule, *sizes, method.late),
        method.num_microbatches,
        feedback=method.coefficient if method.feedback else 0.0,
        warmup_batches=method.warmup_batches,
        merged=wanted.way != ONE_BY_ONE,
    )
    make = OPTIMIZERS[wanted.optimizer]
    opts = make(task, list(model.named_parameters()), wanted.learning_rate)

    def step(tokens: torch.Tensor, target: torch.Tensor) -> None:
        emulated.train_step(tokens, target)
        emulated.step(opts)

    yield step, opts, lambda: [model, *([emulated.uncorrected()] if method.feedback else [])]


@contextlib.contextmanager
def by_pipeline(
    wanted: Wanted,
    task: Task,
    model: nn.Module,
    optimizers: Mapping[str, Make] = OPTIMIZERS,
    **options: Any,
) -> Training:
    """``options``: of the pipeline, beside those of the method."""
    warnings.filterwarnings("ignore", message=".*its gradients are late")
    method = wanted.method
    if method.late:
        raise ValueError(f"{method.name}: a pipeline's schedule says what is late; emulate it")
    with pd2.PipelineModule(
        model,
        task.loss_fn,
        num_stages=method.num_stages,
        num_microbatches=method.num_microbatches,
        schedule=method.schedule,
        warmup_batches=method.warmup_batches,
        example_args=(example_of(wanted, task),),
        **options,
    ) as pipe:
        make = optimizers[wanted.optimizer]
        wrapped = make(task, list(pipe.named_parameters()), wanted.learning_rate)
        staleness = pd2.ErrorFeedback(method.coefficient) if method.feedback else ()
        opt = pd2.PipelineOptimizer(*wrapped, staleness=staleness)

        def step(tokens: torch.Tensor, target: torch.Tensor) -> None:
            pipe.train_step(tokens, target=target)
            opt.step()

        def trained() -> list[nn.Module]:
            whole = task.build()
            whole.load_state_dict(pipe.state_dict())
            return [whole]

        yield step, [opt], trained


def example_of(wanted: Wanted, task: Task) -> torch.Tensor:
    """A batch, of whose size the split is made."""
    return task.held_out[0][: wanted.sizes.rows]


def line(wanted: Wanted, result: Result) -> str:
    return (
        f"{result.optimizer:20} {result.method:40} {result.learning_rate:<6g} "
        f"seed {result.seed:<4} {result.final_loss:.4f}  {result.seconds:.0f} s  {wanted.way}"
    )


Runs = Workers[Wanted, Result]


def best_rate(grid: Sequence[Result]) -> float:
    """Of which the mean of the seeds' losses is the lowest."""
    losses: dict[float, list[float]] = collections.defaultdict(list)
    for result in grid:
        losses[result.learning_rate].append(result.final_loss)
    return min(losses, key=lambda rate: statistics.fmean(losses[rate]))


def run_study(study: Study, sizes: Sizes, only: Sequence[str], passes: int, workers: Runs) -> Table:
    """Makes the first passes' runs; tables have what is kept of all."""
    rates: dict[str, float] = {}
    everything: dict[Wanted, None] = {}
    for number, each in enumerate(study.passes):
        names = [name for name in each.optimizers if name in only]
        make = workers.run_all if number < passes else workers.kept
        for name in (name for name in names if name not in rates):
            of = RATE_OF.get(name, name)
            tried = [
                Wanted(of, SYNCHRONOUS, rate, seed, study.num_batches, sizes)
                for seed in study.seeds_of_grid
                for rate in study.rates
            ]
            grid = make(tried)
            if len(grid) == len(tried):
                rates[name] = best_rate(grid)
        wanted = [
            Wanted(name, method, rates[name] * factor, seed, study.num_batches, sizes, way)
            for factor, seed in itertools.product(each.factors, range(each.num_seeds))
            for name in names
            if name in rates
            for method, way in [
                *((m, EMULATED) for m in each.methods),
                (SYNCHRONOUS, ROWS_REVERSED),
            ]
        ]
        make(wanted)
        everything.update(dict.fromkeys(wanted))
    return Table(rates, workers.kept(list(everything)))


@dataclasses.dataclass
class Row:
    """A method of an optimizer, against synchronous training at the best rate of that.

    Attributes:
        over: by how much its loss is higher, in percent, mean and deviation of the seeds.
        pace: synchronous training's batches until a loss that both reach, over its own.
        best_factor, best_over: at its own best rate, over the synchronous one's best.
        uncorrected: as ``over``, evaluated without the correction.
    """

    optimizer: str
    method: str
    learning_rate: float
    num_seeds: int
    loss: float
    over: float
    deviation: float
    pace: float
    uncorrected: float | None
    best_factor: float
    best_over: float


class Table:
    """Of a study's results, as many as there are."""

    def __init__(self, rates: dict[str, float], results: Sequence[Result]) -> None:
        self._rates = rates
        self.results = results
        self._found = {(r.optimizer, r.method, r.learning_rate, r.seed): r for r in results}

    def rows(self) -> list[Row]:
        pairs = dict.fromkeys((optimizer, method) for optimizer, method, _, _ in self._found)
        rows = [self._row(*pair) for pair in pairs]
        return sorted(
            (row for row in rows if row), key=lambda row: list(self._rates).index(row.optimizer)
        )

    def _runs(self, optimizer: str, method: str, rate: float) -> dict[int, Result]:
        return {
            seed: result
            for (*of, seed), result in self._found.items()
            if of == [optimizer, method, rate]
        }

    def _row(self, optimizer: str, method: str) -> Row | None:
        rate = self._rates[optimizer]
        reference = self._runs(optimizer, SYNCHRONOUS.name, rate)
        mine = {s: r for s, r in self._runs(optimizer, method, rate).items() if s in reference}
        if not mine:
            return None
        pairs = [(result, reference[seed]) for seed, result in mine.items()]
        over = [100 * (a.final_loss / b.final_loss - 1) for a, b in pairs]
        plain = [
            100 * (a.uncorrected_loss / b.final_loss - 1) for a, b in pairs if a.uncorrected_loss
        ]
        factor, loss = self._best(optimizer, method)
        _, least = self._best(optimizer, SYNCHRONOUS.name)
        return Row(
            optimizer,
            method,
            rate,
            len(mine),
            statistics.fmean(a.final_loss for a, _ in pairs),
            statistics.fmean(over),
            statistics.stdev(over) if len(over) > 1 and all(map(math.isfinite, over)) else 0.0,
            statistics.fmean(pace(a.losses, b.losses) for a, b in pairs),
            statistics.fmean(plain) if plain else None,
            factor,
            100 * (loss / least - 1),
        )

    def _best(self, optimizer: str, method: str) -> tuple[float, float]:
        """Of the rates with as many seeds as the best one has without a delay: factor and loss."""
        rate = self._rates[optimizer]
        num_seeds = len(self._runs(optimizer, method, rate))
        means = {
            factor: statistics.fmean(r.final_loss for r in runs.values())
            for factor in (1.0, 0.5, 2.0)
            if len(runs := self._runs(optimizer, method, factor * rate)) >= num_seeds
        }
        factor = min(means, key=means.__getitem__)
        return factor, means[factor]

    def __str__(self) -> str:
        """In Markdown."""
        lines = [
            "| optimizer, learning rate | method | seeds | held-out loss | over synchronous | "
            "evaluated at w | pace to equal loss | own best rate | both at their best |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows():
            plain = "" if row.uncorrected is None else f"{row.uncorrected:+.2f} %"
            lines.append(
                f"| {row.optimizer}, {row.learning_rate:g} | {row.method} | {row.num_seeds} | "
                f"{row.loss:.4f} | {row.over:+.2f} ± {row.deviation:.2f} % | {plain} | "
                f"{row.pace:.3f} | {row.best_factor:g} times | {row.best_over:+.2f} % |"
            )
        return "\n".join(lines)


def pace(mine: Sequence[float], synchronous: Sequence[float]) -> float:
    """Of the synchronous run's batches until a loss that both reach, over the other one's."""
    if not math.isfinite(mine[-1]):
        return 0.0
    loss = max(mine[-1], synchronous[-1])
    return reached(synchronous, loss) / reached(mine, loss)


def run_sample(sizes: Sizes, num_batches: int, only: Sequence[str], workers: Runs) -> str:
    """The losses of the ways to train, and whether the weights' bits are the pipeline's."""
    lines = [f"| optimizer | method | {' | '.join(WAYS)} |", "|---|---|" + "---:|" * len(WAYS)]
    for name, rate, method in SAMPLE:
        if name not in only:
            continue
        wanted = Wanted(name, method, rate, 0, num_batches, sizes)
        results = workers.run_all([dataclasses.replace(wanted, way=way) for way in WAYS])
        cells = [
            f"{result.final_loss:.6f}, "
            + ("the" if result.weights == results[0].weights else "other")
            for result in results
        ]
        lines.append(f"| {name} | {method.name} | {' bits | '.join(cells)} bits |")
    return "\n".join(lines)


def main() -> None:
    options = parse_options()
    where = machine()
    print(describe(where), flush=True)
    with Workers(train, Result, line, jobs=options.jobs, kept=options.kept) as workers:
        if options.study == "sample":
            print(run_sample(options.sizes, options.num_batches, options.only, workers))
            return
        study = dataclasses.replace(STUDIES[options.study], num_batches=options.num_batches)
        table = run_study(study, options.sizes, options.only, options.passes, workers)
    if not table.results:
        sys.exit(f"{options.kept} has no run of this study by torch {torch.__version__}")
    print(f"\n{table}")
    if options.json is not None:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": where,
            "measure": "held-out loss",
            "batches": options.num_batches,
            "sizes": dataclasses.asdict(options.sizes),
            "rows": list(map(as_json, table.rows())),
        }
        options.json.write_text(compact(report))
    if options.pictures is not None:
        draw_all(table, options)


def as_json(row: Row) -> dict[str, Any]:
    """Infinities, for which JSON has no word, as None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(row).items()
    }


def draw_all(table: Table, options: argparse.Namespace) -> None:
    """The losses by tokens, of the deepest pipelines at the best rate without a delay."""
    from pictures import draw

    drawn = {(row.optimizer, row.learning_rate) for row in table.rows()}
    chosen = [
        result
        for result in table.results
        if (result.optimizer, result.learning_rate) in drawn and result.method in DRAWN
    ]
    of_each = collections.Counter((result.optimizer, result.seed) for result in chosen)
    results = [
        {"task": "byte GPT", **dataclasses.asdict(result)}
        for result in chosen
        if of_each[result.optimizer, result.seed] == len(DRAWN)  # not those that are under way
    ]
    tokens = options.num_batches * options.sizes.rows * options.sizes.context
    report = {
        "measure": "held-out loss",
        "unit": "tokens",
        "window": tokens / NUM_LOOKS,
        "at": 1.0,
        "results": results,
    }
    draw(report, options.pictures, f"late_forwards_{options.study}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("study", nargs="?", choices=(*STUDIES, "sample"), default="short")
    add("--only", action="append", choices=OPTIMIZERS, help="of all optimizers, those so named")
    add("--passes", type=int, default=9, help="only the first of the study; 0: tables what is kept")
    add("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    add("--kept", type=Path, metavar="PATH", help="in place of late_forwards.jsonl beside this")
    add("--json", type=Path, metavar="PATH", help="write the table there")
    add("--pictures", type=Path, metavar="FOLDER", help="draw the losses there")
    add("--smoke", action="store_true", help="quick: the losses mean nothing")
    options = parser.parse_args()
    options.only = options.only or list(OPTIMIZERS)
    options.sizes = Sizes()
    options.num_batches = STUDIES[
        "short" if options.study == "sample" else options.study
    ].num_batches
    if options.smoke:
        options.sizes, options.num_batches = Sizes(3, 16, 16, 32, 32), NUM_LOOKS
        options.only = options.only[:1]
        few = Pass(options.only, methods((4,)), num_seeds=1)
        STUDIES[options.study] = Study(NUM_LOOKS, LADDER[1:2], (100,), [few])
        SAMPLE[1:] = []
    elif options.kept is None:
        options.kept = Path(__file__).with_suffix(".jsonl")
    return options


if __name__ == "__main__":
    main()
