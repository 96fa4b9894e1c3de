"""Which models train exactly, each as a pipeline against itself unsplit.

A model is built with random weights, split over stage threads, and trained for three batches under
2bw; the same model, unsplit, is trained by the tests' oracle (tests/references/oracle.py) with the
same random numbers. Compared are losses and weights: "bitwise", or the largest difference of a
tensor over its norm (of one that is next to nothing, over a hundredth of the usual). With
--precision it is trained by that of mixed precision (tests/references/mixed_oracle.py), and the
difference is that of all weights over how far they went: a product's last bit is a rounding of 16
bits there. A model is refused if the package says why it cannot take it. There is "no truth" where
the unsplit model's training is another one when it is repeated, or differs by a third as much when
its weights begin with other last bits. Each runs in a process of its own, which has a time limit,
or in as many as there are stages. With --compile models are in eval mode: compiled stages draw
random numbers of their own.

    python benchmarks/models/survey.py [--only NAMES] [--stages N] [--processes] [--precision bf16]
                                       [--compile] [--limit SECONDS] [--outcomes PATH]
                                       [--json PATH] [--smoke]

--outcomes keeps each outcome when it is there, so that a survey that was cut off goes on.
table.py makes the table of docs/models.md from the files that --json writes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import importlib.util
import io
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

# Otherwise the bits of a product depend on where in memory its matrices lie, and weights that are
# views of a stage's buffer lie elsewhere than the unsplit model's. It is read at the first product.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipedream2bw as pd2
from benchmarks.measuring.kept import Kept
from benchmarks.measuring.report import arguments, compact, describe, machine
from benchmarks.models import perception, text, vision
from benchmarks.models.zoo import Example, Model, mean_square
from pipedream2bw.capture.captured import place_of
from tests.references.mixed_oracle import MixedOracle, lowered
from tests.references.oracle import Batch, Oracle

BATCHES = 3
NUM_MICROBATCHES = 4
ROWS = 2  # of a microbatch: a BatchNorm over one row has no variance
CLOSE = 1e-6
# Of the usual size of a weight: what is smaller may be rounding alone, as the biases of attention's
# keys are, which change no output. CLOSE of that is still a sixth of a usual weight's last bit.
NOISE = 1e-2
CLOSE_LOW = 3e-2  # with 16-bit numbers
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the model's state."""
LAST_BIT = 2.0**-23
CHAOS = 3.0  # one choice of last bits moves a model more, another less
SMOKE = ("transformers/qwen2", "transformers/t5")


@dataclasses.dataclass
class Outcome:
    """What became of a model."""

    model: str
    verdict: str
    """"bitwise", "close", "WRONG", "no truth", "refused", "not built", "CRASH" or "HANG"."""
    route: str = ""
    """How the model was captured."""
    seconds: float = 0.0
    """Of the processor's time, until the pipeline was made."""
    difference: float = 0.0
    """The largest of a tensor over its norm."""
    stages: str = ""
    """The modules in which the stages begin."""
    reason: str = ""

    @property
    def first_reason(self) -> str:
        return self.reason.partition("\n")[0]

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("WRONG", "CRASH", "HANG")


def all_models() -> dict[str, Model]:
    """By name; of libraries that are installed."""
    found = [*vision.models(), *text.models(), *perception.models()]
    return {
        f"{model.library}/{model.name}": model
        for model in found
        if importlib.util.find_spec(model.library) is not None
    }


def examine(name: str, model: Model, options: argparse.Namespace) -> Outcome:
    torch.manual_seed(0)
    num_microbatches = max(NUM_MICROBATCHES, options.stages)
    try:
        module = model.build().train(not options.compile)  # which draws other random numbers
        batches = [model.example(ROWS * num_microbatches) for _ in range(BATCHES)]
        reference = copy.deepcopy(module)
        copy.deepcopy(module)(*copy.deepcopy(batches[0][0]), **batches[0][1])
    except Exception as error:
        return Outcome(name, "not built", reason=_first_line(error))
    args, kwargs = batches[0]
    start = time.process_time()
    try:
        pipe = pd2.PipelineModule(
            module,
            mean_square,
            num_stages=options.stages,
            num_microbatches=num_microbatches,
            example_args=args,
            example_kwargs=kwargs,
            precision=options.precision,
            compile=options.compile,
            timeout=options.limit,
        )
    except (ValueError, TypeError) as error:
        return Outcome(name, "refused", seconds=time.process_time() - start, reason=str(error))
    seconds = time.process_time() - start
    with pipe:
        route, stages = _shown(pipe)
        optimizer = pd2.PipelineOptimizer(_sgd(pipe.parameters()))
        losses = []
        for args, kwargs in batches:
            losses.append(pipe.train_step(*args, target=None, **kwargs))
            optimizer.step()
        ours = [float(loss) for loss in losses]
        state = {key: value.clone() for key, value in pipe.full_state_dict().items()}
        seed = pipe.random_seed
    if not state:  # another process compares
        return Outcome(name, "bitwise")
    define = functools.partial(
        _by_definition,
        precision=options.precision,
        batches=batches,
        seed=seed,
        num_microbatches=num_microbatches,
    )
    compare = functools.partial(_difference, reference, options.precision, define(reference))
    close = CLOSE_LOW if options.precision else CLOSE
    difference, reason = compare((ours, state)), ""
    verdict = "bitwise" if difference == 0.0 else "close" if difference <= close else "WRONG"
    if verdict == "WRONG":
        if (again := compare(define(reference))) > close:
            verdict = "no truth"
            reason = f"the unsplit model repeats its own training to {again:.0e}"
        elif CHAOS * (nudged := compare(define(_nudged(reference)))) >= difference:
            verdict = "no truth"
            reason = f"other last bits of its weights change the unsplit model by {nudged:.0e}"
    return Outcome(name, verdict, route, seconds, difference, stages, reason)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _by_definition(
    model: torch.nn.Module,
    *,
    precision: str | None,
    batches: list[Example],
    seed: int,
    num_microbatches: int,
) -> Trained:
    """Trains a copy of the unsplit model."""
    model = copy.deepcopy(model)
    settings = (_sgd(model.parameters()), num_microbatches, mean_square)
    options: dict[str, Any] = {
        "delay": 1,
        "drawing": lambda train_step, microbatch: pd2.reference_random(
            seed=seed, train_step=train_step, microbatch=microbatch
        ),
    }
    oracle: Oracle | MixedOracle
    if precision is None:
        oracle = Oracle(model, *settings, **options)
    else:
        dtype = DTYPES[precision]
        oracle = MixedOracle(model, lowered(model, dtype), *settings, dtype=dtype, **options)
    losses = [oracle.train_step(Batch(args, None, kwargs)) for args, kwargs in batches]
    return losses, model.state_dict()


def _nudged(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights have other last bits, by chance."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + LAST_BIT * (2.0 * torch.randint_like(parameter, 2) - 1)
    return model


def _difference(
    initial: torch.nn.Module, precision: str | None, right: Trained, found: Trained
) -> float:
    """The largest difference of a loss, and of a tensor over its norm.

    With a precision that of all trained weights over how far they went.
    """
    differences = _of_losses(found[0], right[0])
    trained = {name: p.detach() for name, p in initial.named_parameters() if p.requires_grad}
    begin, names = list(trained.values()), list(trained)
    theirs, ours = ([state[name] for name in names] for state in (right[1], found[1]))
    if precision is not None:
        differences.append(_norm(ours, theirs) / max(_norm(theirs, begin), 1e-30))
        return _largest(differences)
    usual = _norm(theirs) / sum(parameter.numel() for parameter in theirs) ** 0.5
    for key, value in right[1].items():
        least = max(NOISE * usual * value.numel() ** 0.5, 1e-30)
        differences.append(_norm([found[1][key]], [value]) / max(_norm([value]), least))
    return _largest(differences)


def _of_losses(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True)]


def _norm(these: list[torch.Tensor], those: list[torch.Tensor] | None = None) -> float:
    """Of these tensors, or of their differences from those."""
    others = those or [torch.zeros(()) for _ in these]
    norms = [(a.double() - b.double()).norm() for a, b in zip(these, others, strict=True)]
    return float(torch.stack(norms).norm())


def _largest(differences: list[float]) -> float:
    return max(value if value == value else float("inf") for value in differences)


def _shown(pipe: pd2.PipelineModule) -> tuple[str, str]:
    """How the model was captured, and where the stages begin."""
    mode = pipe.session.modes.first
    begins = [place_of(mode.captured, program.layers[0]) for program in mode.programs[1:]]
    return mode.captured.how, ", ".join(begins)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _in_child(
    results: Any, name: str, model: Model, options: argparse.Namespace, rank: int, meeting: str
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(0.9 * options.limit)  # then it hangs
    try:
        if meeting:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=options.stages,
                timeout=datetime.timedelta(seconds=options.limit),
            )
        with contextlib.redirect_stderr(io.StringIO()):
            outcome = examine(name, model, options)
    except BaseException as error:
        if options.verbose:
            traceback.print_exc()
        outcome = Outcome(name, "CRASH", reason=_first_line(error))
    results.put((rank, outcome))
    if meeting and outcome.verdict != "CRASH":
        dist.destroy_process_group()


def in_processes(name: str, model: Model, options: argparse.Namespace) -> Outcome:
    """Examines a model in processes of its own, within ``options.limit`` seconds.

    Returns rank 0's outcome, or the first one that went wrong.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/ranks" if options.processes else ""
        children = [
            context.Process(target=_in_child, args=(results, name, model, options, rank, meeting))
            for rank in range(options.stages if options.processes else 1)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + options.limit
        found: dict[int, Outcome] = {}
        try:
            while len(found) < len(children):
                try:
                    rank, found[rank] = results.get(timeout=1.0)
                    if found[rank].is_bad:  # the others may wait for it
                        return found[rank]
                except queue.Empty:
                    if time.monotonic() > deadline:
                        return Outcome(name, "HANG", reason=f"not done after {options.limit} s")
                    for rank, child in enumerate(children):
                        if rank not in found and not child.is_alive() and results.empty():
                            return Outcome(name, "CRASH", reason=f"exit code {child.exitcode}")
        finally:
            for child in children:
                child.kill()
                child.join()
    return found[0]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=None)
    parser.add_argument("--only", metavar="NAMES", help="parts of names, by comma")
    parser.add_argument("--stages", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--processes", action="store_true", help="one for each stage")
    parser.add_argument("--precision", choices=DTYPES, help="as PipelineModule takes it")
    parser.add_argument("--compile", action="store_true", help="the stages, in eval mode")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="of a model; %(default)s"
    )
    parser.add_argument(
        "--outcomes", type=Path, metavar="PATH", help="keep each there, repeat none that is there"
    )
    parser.add_argument("--verbose", action="store_true", help="print where a model crashed")
    options = parser.parse_args()
    where = machine()
    print(describe(where), flush=True)
    models = all_models()
    parts = options.only.split(",") if options.only else [""]
    chosen = [name for name in models if any(part in name for part in parts)]
    if options.smoke:
        chosen = list(SMOKE)
    if not chosen:
        parser.error(f"--only: {options.only}, known are {', '.join(models)}")
    # Here, so that each process needs not import them, and that no capture's time has it.
    for library in (*{models[name].library for name in chosen}, "torch._dynamo", "torch.export"):
        importlib.import_module(library)
    outcomes = []
    kept = Kept(options.outcomes)
    for name in chosen:
        setting = f"{name} {options.stages} {options.precision} {options.compile}"
        if options.processes:
            setting += " processes"
        if setting not in kept:
            kept.add(setting, dataclasses.asdict(in_processes(name, models[name], options)))
        outcomes.append(found := Outcome(**kept[setting]))
        print(
            f"{found.verdict:10} {found.difference:8.1e} {found.seconds:6.1f} s  "
            f"{found.model:45} {found.route:10} {found.stages}  {found.first_reason}",
            flush=True,
        )
    counts = dict.fromkeys(sorted({found.verdict for found in outcomes}), 0)
    for found in outcomes:
        counts[found.verdict] += 1
    print(f"{len(outcomes)} models:", ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if options.json:
        report = {
            "machine": where,
            "stages": options.stages,
            "processes": options.processes,
            "precision": options.precision,
            "compile": options.compile,
            "counts": counts,
            "models": [dataclasses.asdict(found) for found in outcomes],
        }
        options.json.write_text(compact(report))
    if any(found.is_bad for found in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
