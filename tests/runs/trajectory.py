"""The same training by the pipeline and by the oracle, and how to compare what came out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

import pipedream2bw as pd2
from pipedream2bw.capture import captured
from pipedream2bw.capture.costs import CostCounter
from pipedream2bw.capture.dry_run import Findings, dry_run
from tests.references.oracle import Batch, Oracle, ReadyMade
from tests.samples.models import Task, whole

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Between = Callable[[int, Any, torch.optim.Optimizer], None]
"""Called before each batch with its number, the pipeline (or the oracle) and the optimizer."""


@dataclasses.dataclass
class Trajectory:
    """Losses by batch, and the parameters and buffers of the end by name."""

    losses: list[float]
    state: dict[str, torch.Tensor]

    def on_host(self) -> Trajectory:
        return Trajectory(self.losses, {name: value.cpu() for name, value in self.state.items()})


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def do_nothing(batch: int, trained: Any, optimizer: torch.optim.Optimizer) -> None:
    """Nothing between the batches."""


def make_pipeline(
    task: Task,
    num_stages: int,
    num_microbatches: int | Sequence[int],
    example: Batch,
    **options: Any,
) -> pd2.PipelineModule:
    usual = {"split": task.split(num_stages), "num_stages": num_stages, "timeout": 120.0}
    options = {**usual, **options}
    known = _of_task.set(task if options.keys() <= _OF_STAGES else None)
    try:
        pipe = pd2.PipelineModule(
            options.pop("model", None) or task.model(),
            task.loss_fn,
            num_microbatches=num_microbatches,
            example_args=example.args,
            example_kwargs=dict(example.kwargs),
            **options,
        )
    finally:
        _of_task.reset(known)
    if pipe.random_seed is not None:
        pipe.session.random_seed = _RANDOM_SEED
    return pipe


_OF_STAGES = {
    *("split", "num_stages", "timeout", "schedule", "stages_per_rank", "recompute"),
    *("width", "replica_sums", "bucket_cap_mb", "accumulate", "warmup_batches", "replicated"),
}
"""Options under which a task's model is captured as it is."""
_of_task: ContextVar[Task | None] = ContextVar("_of_task", default=None)
_found: dict[Any, Findings] = {}


def _dry_run_once(
    root: nn.Module,
    graph: fx.Graph,
    attribute_of: Any,
    examples: Sequence[torch.Tensor],
    counter: CostCounter | None = None,
    **options: Any,
) -> Findings:
    """What a dry run of a task's model gave: every schedule would ask a quarter of its time for it.

    Models of other tests, and of tasks with other options, are run.
    """
    task = _of_task.get()
    if task is None:
        return dry_run(root, graph, attribute_of, examples, counter, **options)
    state = [*root.named_parameters(), *root.named_buffers(), *enumerate(examples)]
    described = [(n, t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for n, t in state]
    modes = [module.training for module in root.modules()]
    asked = (counter is None, options.get("call") is not None, options.get("compares"))
    key = (task, str(graph), repr(described), tuple(modes), asked)
    if key not in _found:
        _found[key] = dry_run(root, graph, attribute_of, examples, counter, **options)
    return _found[key]


captured.dry_run = _dry_run_once


def drawing(train_step: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
    """The oracle's: as the pipelines above draw."""
    return pd2.reference_random(seed=_RANDOM_SEED, train_step=train_step, microbatch=microbatch)


_RANDOM_SEED = 2**63 + 5


def train_on(pipe: pd2.PipelineModule, batch: Batch | ReadyMade) -> pd2.Loss:
    """A train_step on a batch, or on ready-made microbatches."""
    if isinstance(batch, Batch):
        return pipe.train_step(*batch.args, target=batch.target, **batch.kwargs)
    return pipe.train_step(
        microbatches=[
            pd2.Microbatch(*each.args, target=each.target, **each.kwargs)
            for each in batch.microbatches
        ]
    )


def by_pipeline(
    task: Task,
    batches: Sequence[Batch | ReadyMade],
    num_stages: int,
    num_microbatches: int | Sequence[int],
    make_optimizer: MakeOptimizer = sgd,
    between: Between = do_nothing,
    *,
    staleness: Any = (),
    example: Batch | None = None,
    **options: Any,
) -> Trajectory:
    if example is None:
        (example,) = (batches[0],) if isinstance(batches[0], Batch) else batches[0].microbatches[:1]
    pipe = make_pipeline(task, num_stages, num_microbatches, example, **options)
    with pipe:
        optimizer = pd2.PipelineOptimizer(make_optimizer(pipe.parameters()), staleness=staleness)
        losses = []
        for number, batch in enumerate(batches):
            between(number, pipe, optimizer)
            losses.append(train_on(pipe, batch))
            if (number + 1) % options.get("accumulate", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
        state = copy_of(pipe.state_dict())
        return Trajectory([loss.item() for loss in losses], state)


def go_on(
    pipe: pd2.PipelineModule,
    optimizer: pd2.PipelineOptimizer,
    batches: Iterable[Batch],
    *,
    flush_after: Collection[int] = (),
) -> Trajectory:
    """Trains a pipeline on batches, each of which is one step."""
    losses = []
    for number, batch in enumerate(batches):
        losses.append(train_on(pipe, batch))
        optimizer.step()
        if number in flush_after:
            pipe.flush()
    state = copy_of(pipe.state_dict())
    return Trajectory([loss.item() for loss in losses], state)


def by_oracle(
    task: Task,
    batches: Sequence[Batch | ReadyMade],
    num_microbatches: int,
    make_optimizer: MakeOptimizer = sgd,
    between: Between = do_nothing,
    *,
    schedule: str = "2bw",
    model: nn.Module | None = None,
    delay_of: Mapping[str, int] | None = None,
    late_of: Mapping[str, int] | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Trajectory:
    """``accumulate`` divides the batches.

    Args:
        delay_of: under "pipedream", of each parameter.
        late_of: how many forwards of a batch read the old version of each parameter; None: all.
    """
    model = whole(task.model()) if model is None else model
    optimizer = make_optimizer(model.parameters())
    delay: int | list[int] = int("2bw" in schedule)
    if schedule == "pipedream":
        assert delay_of is not None
        delay = [delay_of[name] for name, _ in model.named_parameters()]
    if late_of is not None:
        options["late"] = [late_of[name] for name, _ in model.named_parameters()]
    if "chimera" in schedule:
        options["num_pipelines"] = 2
    options.setdefault("drawing", drawing)
    oracle = Oracle(model, optimizer, num_microbatches, task.loss_fn, delay, **options)
    losses: list[float] = []
    for first in range(0, len(batches), accumulate):
        steps = batches[first : first + accumulate]
        for number in range(first, first + accumulate):
            between(number, oracle, optimizer)
        losses += [loss for (loss,) in oracle.train_together([[batch] for batch in steps])]
    return Trajectory(losses, copy_of(model.state_dict()))


def expected(
    task: Task,
    rows: Sequence[int],
    num_microbatches: int,
    make_optimizer: MakeOptimizer = sgd,
    *,
    schedule: str = "2bw",
    **options: Any,
) -> Trajectory:
    """What the oracle gives on the task's batches, kept, as many schedules have one definition.

    Not to be changed: tests share it.
    """
    kinds = ("pipedream", "chimera", "2bw_fresh", "2bw")
    same = next((name for name in kinds if name in schedule), "1f1b")
    key = (task, tuple(rows), num_microbatches, make_optimizer, same, repr(options))
    if key not in _expected:
        batches = task.batches(rows)
        _expected[key] = by_oracle(
            task, batches, num_microbatches, make_optimizer, schedule=same, **options
        )
    return _expected[key]


_expected: dict[Any, Trajectory] = {}


def delays_under_pipedream(task: Task, num_stages: int, example: Batch) -> dict[str, int]:
    """Stage i is d - 1 - i batches late."""
    with make_pipeline(task, num_stages, 1, example, schedule="pipedream") as pipe:
        return {name: num_stages - 1 - stage for name, stage in stage_of_parameters(pipe).items()}


def late_when_fresh(
    task: Task, num_stages: int, num_microbatches: int, example: Batch, **options: Any
) -> dict[str, int]:
    """How many forwards of a batch read the old version of each parameter.

    Args:
        options: of the optimizer, and ``update_slots``.
    """
    of_pipe = {key: options.pop(key) for key in ("update_slots", "schedule") if key in options}
    of_pipe.setdefault("schedule", "2bw_fresh")
    with make_pipeline(task, num_stages, num_microbatches, example, **of_pipe) as pipe:
        pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), **options)
        late = pipe.late_forwards
        return {name: late[stage] for name, stage in stage_of_parameters(pipe).items()}


def version_options(
    task: Task, num_stages: int, num_microbatches: int, example: Batch, schedule: str
) -> dict[str, Any]:
    """What the oracle needs to know of a schedule whose stages differ in what they read."""
    if schedule == "pipedream":
        return {"delay_of": delays_under_pipedream(task, num_stages, example)}
    if schedule == "2bw_fresh":
        return {"late_of": late_when_fresh(task, num_stages, num_microbatches, example)}
    return {}


def stage_of_parameters(pipe: pd2.PipelineModule) -> dict[str, int]:
    programs = pipe.session.modes.first.programs
    return {name: program.index for program in programs for name in program.parameters}


def copy_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_same(got: Trajectory, want: Trajectory, *, exact: bool = True) -> None:
    """Bitwise, or each tensor (and the losses) within 1e-6 of its norm."""
    if exact:
        assert got.losses == want.losses
    else:
        assert_close("losses", torch.tensor(got.losses), torch.tensor(want.losses))
    assert_same_state(got.state, want.state, exact=exact)


def assert_same_state(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *, exact: bool = True
) -> None:
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        ours = got[name]
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
        if exact or not theirs.is_floating_point():
            assert torch.equal(ours, theirs), f"{name} differs by {(ours - theirs).abs().max()}"
        else:
            assert_close(name, ours, theirs)


def assert_close(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, *, within: float = 1e-6
) -> None:
    distance = (ours - theirs).norm()
    assert distance <= within * theirs.norm(), f"{name}: {distance}, norm {theirs.norm()}"


def check_task(
    task: Task,
    num_stages: int,
    num_microbatches: int,
    rows: Sequence[int],
    make_optimizer: MakeOptimizer = sgd,
    *,
    exact: bool | None = None,
    schedule: str = "2bw",
    **options: Any,
) -> None:
    """Trains by both, on batches of the given numbers of rows, and compares."""
    batches = task.batches(rows)
    shared = {
        key: options[key]
        for key in ("loss_reduction", "replicated", "accumulate", "warmup_batches")
        if key in options
    }
    shared |= version_options(task, num_stages, num_microbatches, batches[0], schedule)
    want = expected(task, rows, num_microbatches, make_optimizer, schedule=schedule, **shared)
    got = by_pipeline(
        task, batches, num_stages, num_microbatches, make_optimizer, schedule=schedule, **options
    )
    assert_same(got, want, exact=task.exact if exact is None else exact)
