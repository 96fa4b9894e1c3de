"""Random failures of the user's code in random training, and what the same is without them.

Each rank trains twice: as drawn, and on the batches alone that were not discarded, without any
failure. Both must give the same bits. What that second run gives, the unsplit model gives; here it
is compared with it too, where a definition is at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipedream2bw as pd2
from pipedream2bw import _C
from pipedream2bw.errors import StageError
from tests.references.late_forwards import late_of_2bw
from tests.references.oracle import Batch, Oracle
from tests.runs.trajectory import copy_of, drawing
from tests.samples import failing_model as sample
from tests.samples.failing_model import Failing, Failure
from tests.samples.schedule_sizes import TWO_PIPELINES, Sizes, sizes_for
from tests.samples.tied_models import untied

THREADS, SHARED_MEMORY, GLOO = "threads", "shared memory", "gloo"
_SEED = 2**63 + 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and what fails in it.

    Attributes:
        depth: ranks of a replica.
        clip: "", "norm" or "value".
        evaluates, reads, flushes: positions before or after which this is done.
    """

    number: int
    schedule: str
    sizes: Sizes
    depth: int
    width: int
    transport: str
    optimizer: str
    clip: str
    precision: str | None
    scaled: bool
    norm: bool
    dropout: bool
    tied: bool
    accumulate: int
    recompute: bool
    warmup: int
    count: int
    failures: tuple[Failure, ...]
    evaluates: frozenset[int]
    reads: frozenset[int]
    flushes: frozenset[int]

    @property
    def world(self) -> int:
        """Processes."""
        return 1 if self.transport == THREADS else self.depth * self.width

    @property
    def delay(self) -> list[int]:
        """Of each stage."""
        d = self.sizes.num_stages
        if self.schedule == "pipedream":
            return [d - 1 - stage for stage in range(d)]
        return [int("2bw" in self.schedule)] * d

    @property
    def late(self) -> list[int] | None:
        """Of each stage, the forwards of a batch that are late; None: all."""
        if self.schedule != "2bw_fresh":
            return None
        d = self.sizes.num_stages
        return late_of_2bw(
            d,
            waits_for_all=self.clip == "norm" or self.scaled,
            tied=[0, d - 1] if self.tied else [],
            backward=3.0 if self.recompute else 2.0,
        )

    @property
    def has_verdicts(self) -> bool:
        """Whether all stages are known to have done a batch before any makes its update."""
        has_room = self.precision is None and self.optimizer != "muon"
        waits = self.schedule not in ("pipedream", "2bw_fresh")
        is_free = waits and (max(self.delay) == 0 or has_room)
        return self.clip == "norm" or self.scaled or is_free

    def may_end(self, error: StageError) -> bool:
        """Whether the documents let this failure end the pipeline."""
        is_backward = error.action in ("backward", "input gradient", "weight gradient")
        last = self.sizes.num_stages - 1
        is_early = is_backward and error.stage != last
        fails_late = any((f.kind, f.layer) == ("weight gradient", last) for f in self.failures)
        is_late = is_backward and fails_late
        return not self.has_verdicts and (is_early or is_late or self.transport == GLOO)


@dataclasses.dataclass
class Raised:
    """What a rank raised as it took batches back.

    Attributes:
        where: the action that failed, and whether the last stage's.
    """

    kind: str
    discarded: tuple[int, ...] | None
    text: str
    where: str = ""


@dataclasses.dataclass
class Seen:
    """What a rank saw.

    Attributes:
        raised: each time batches were taken back, or the pipeline ended.
        kept: the positions of the train_steps that were not discarded.
        restarts: before which of these the delay began anew: after each discarded batch.
        losses: of the train_steps that were kept.
        met: the failures that were raised in this process.
        wrong: what is wrong; "" if nothing is.
        ended: what has ended the pipeline.
    """

    raised: list[Raised] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    restarts: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    metrics: list[float] = dataclasses.field(default_factory=list)
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    moments: Any = None
    met: list[Failure] = dataclasses.field(default_factory=list)
    wrong: str = ""
    ended: str = ""


# ---------------------------------------------------------------- which cases there are


def draw(number: int, seed: int) -> Case:
    """A case that the package takes."""
    chance = random.Random(f"{seed} {number}")
    transport = chance.choice([THREADS, SHARED_MEMORY, GLOO])
    width = 1 if transport == THREADS else chance.choice([1, 1, 2])
    sizes: list[tuple[int, Sizes]] = []
    while not sizes:
        schedule = chance.choice(pd2.schedule_names())
        depth = chance.choice([2, 3, 4] if width == 1 else [2, 2, 3])
        found = [
            each
            for v in (1, 2)
            for each in sizes_for(schedule, v * depth)
            if each.stages_per_rank == v and each.num_microbatches <= 12
        ]
        sizes = [(depth, each) for each in found]
    depth, size = chance.choice(sizes)
    m = size.num_microbatches
    scaled = schedule != "pipedream" and chance.random() < 0.2
    precision = chance.choice([None, None, None, "bf16"])
    count = chance.choice([7, 8, 9])
    recompute = chance.random() < 0.3
    return Case(
        number=number,
        schedule=schedule,
        sizes=size,
        depth=depth,
        width=width,
        transport=transport,
        optimizer=chance.choice(["sgd", "sgd", "adamw", "muon"]),
        clip=chance.choice(["", "", "norm", "value"]),
        precision=precision,
        scaled=scaled,
        norm=chance.random() < 0.4,
        dropout=chance.random() < 0.4,
        tied=chance.random() < 0.3,
        accumulate=chance.choice([1, 1, 1, 2]),
        recompute=recompute,
        warmup=chance.choice([0, 0, 0, 2]),
        count=count,
        failures=tuple(_failures(chance, count, size.num_stages, m, width, recompute)),
        evaluates=frozenset(i for i in range(count) if chance.random() < 0.15),
        reads=frozenset(i for i in range(count) if chance.random() < 0.3),
        flushes=frozenset(i for i in range(count) if chance.random() < 0.1),
    )


def _failures(
    chance: random.Random, count: int, layers: int, m: int, width: int, recompute: bool
) -> Iterator[Failure]:
    first = chance.choice([0, count - 1, *range(count)])
    positions = [first]
    for _ in range(chance.choice([0, 0, 1, 2])):
        positions.append(chance.choice([*range(count), min(first + 1, count - 1), first]))
    for position in positions:
        kind = chance.choice([k for k in sample.KINDS if recompute or k != "second forward"])
        yield Failure(
            kind=kind,
            position=position,
            microbatch=0 if kind in sample.OF_INPUT else chance.randrange(m),
            layer=0 if kind in sample.OF_LAST_STAGE else chance.randrange(layers),
            replica=chance.randrange(width),
            raised=chance.randrange(len(sample.RAISED)),
        )


# ---------------------------------------------------------------- in the ranks


def run_cases(rank: int, world: int, cases: Sequence[Case], seconds: float) -> list[Seen]:
    """What each gives here. A case that takes longer than so many seconds ends the process."""
    seen = []
    for case in cases:
        print("case", case.number, flush=True)
        faulthandler.dump_traceback_later(seconds, exit=True)
        with _over(case.transport):
            seen.append(run_case(case))
        faulthandler.cancel_dump_traceback_later()
    return seen


@contextlib.contextmanager
def _over(transport: str) -> Iterator[None]:
    make = _C.SharedBoard.create
    if transport == GLOO:
        _C.SharedBoard.create = staticmethod(lambda *args: None)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _C.SharedBoard.create = make  # type: ignore[method-assign]


def run_case(case: Case) -> Seen:
    seen = train(case, case.failures, list(range(case.count)))
    if seen.ended or seen.wrong:
        return seen
    again = train(case, (), seen.kept, seen.restarts)
    if again.raised or again.ended or again.wrong:
        seen.wrong = f"without failures: {again.wrong} {again.ended} {again.raised}"
        return seen
    for name in ("losses", "metrics", "state", "moments"):
        seen.wrong = seen.wrong or difference(name, getattr(seen, name), getattr(again, name))
    return seen


def difference(where: str, got: Any, want: Any) -> str:
    """Where two trees of tensors and numbers differ first, "" if they are the same bits."""
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"{where}: {sorted(got.keys() ^ want.keys(), key=str)} on one side alone"
        pairs = [(f"{where}[{key!r}]", got[key], want[key]) for key in want]
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{where}: {len(got)} entries, not {len(want)}"
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, torch.Tensor):
        same = got.dtype == want.dtype and torch.equal(got.nan_to_num(), want.nan_to_num())
        return "" if same else f"{where} differs by {(got - want).abs().max()}"
    else:
        return "" if str(got) == str(want) else f"{where}: {got!r}, not {want!r}"
    return next(filter(None, (difference(*pair) for pair in pairs)), "")


def train(
    case: Case, failures: Sequence[Failure], positions: Sequence[int], restarts: Sequence[int] = ()
) -> Seen:
    """Trains on the batches of these positions, and goes on after each error.

    Args:
        restarts: before which of the batches the delay begins anew.
    """
    replica = dist.get_rank() // case.depth if case.world > 1 else 0
    failing = Failing([f for f in failures if f.replica == replica])
    pipe = _pipeline(case, failing)
    seen = Seen(met=failing.met)
    with pipe:
        opt = pd2.PipelineOptimizer(
            *_optimizers(case.optimizer, pipe.parameters()), **_optimizer_options(case)
        )
        loop = _Loop(case, pipe, opt, failing, seen)
        for number, position in enumerate(positions):
            if number in restarts:
                loop.survive(pipe.flush)
                for stage in pipe.session.stages:
                    stage.weights.engine.restart_delay()
            loop.train_on(position, is_again=not failures)
            if seen.ended:
                _read_what_is_left(pipe, opt, seen, case)
                return seen
        loop.survive(pipe.flush)
        if seen.ended:
            _read_what_is_left(pipe, opt, seen, case)
            return seen
        seen.losses = [loss.item() for loss in loop.losses]
        seen.metrics = [loss.metrics["mean"] for loss in loop.losses]
        seen.state = copy_of(pipe.state_dict())
        seen.moments = opt.state_dict()
    return seen


def _pipeline(case: Case, failing: Failing) -> pd2.PipelineModule:
    d, m = case.sizes.num_stages, case.sizes.num_microbatches
    model = sample.make_model(failing, d, norm=case.norm, dropout=case.dropout, tied=case.tied)
    example = sample.batches(1, m, seed=0)[0]
    options: dict[str, Any] = {"width": case.width} if case.world > 1 else {}
    pipe = pd2.PipelineModule(
        list(model),
        sample.loss_of(failing),
        example_args=example.args,
        schedule=case.schedule,
        num_microbatches=m,
        stages_per_rank=case.sizes.stages_per_rank,
        precision=case.precision,
        accumulate=case.accumulate,
        recompute=case.recompute,
        warmup_batches=case.warmup,
        metrics={"mean": sample.metric_of(failing)},
        timeout=20.0,
        **options,
    )
    pipe.session.random_seed = _SEED
    return pipe


class _Loop:
    """A user's loop that goes on after every error."""

    def __init__(
        self,
        case: Case,
        pipe: pd2.PipelineModule,
        opt: pd2.PipelineOptimizer,
        failing: Failing,
        seen: Seen,
    ) -> None:
        self.case, self.pipe, self.opt, self.failing, self.seen = case, pipe, opt, failing, seen
        self.losses: list[pd2.Loss] = []
        replica = dist.get_rank() // case.depth if case.world > 1 else 0
        self.given = batches_of(case, replica)

    def survive(self, call: Callable[[], Any]) -> Any:
        """What it returns, when it does not raise that batches were taken back."""
        while not self.seen.ended:
            try:
                return call()
            except StageError as error:
                self.note(error)
        return None

    def note(self, error: StageError) -> None:
        seen = self.seen
        kind = type(error).__name__
        is_last = error.stage == self.case.sizes.num_stages - 1
        where = f"{error.action}, {'the last' if is_last else 'an earlier'} stage"
        seen.raised.append(Raised(kind, error.discarded, str(error), where))
        if error.discarded is None:
            seen.ended = kind
            if not self.case.may_end(error):
                seen.wrong = f"the pipeline has ended: {error}"
            return
        if error.discarded:
            first = error.discarded[0]
            if error.discarded != tuple(range(first, len(seen.kept))):
                seen.wrong = f"{len(seen.kept)} train_steps, but {error}"
            del seen.kept[first:], self.losses[first:]
            seen.restarts[:] = [n for n in seen.restarts if n <= first]
            if first not in seen.restarts:
                seen.restarts.append(first)

    def train_on(self, position: int, *, is_again: bool) -> None:
        case, pipe, seen = self.case, self.pipe, self.seen
        if position in case.flushes and not is_again:
            self.survive(pipe.flush)
        if position in case.evaluates and not is_again:
            self.survive(lambda: self.evaluate(position))
        batch = self.given[position]
        for kind in sample.OF_INPUT:
            if self.failing.meet(kind, position):
                batch = sample.spoiled(batch, kind)
        try:
            loss = self.survive(lambda: pipe.train_step(*batch.args, target=batch.target))
        except (ValueError, TypeError) as error:  # all ranks refuse it
            if batch is not self.given[position] or case.width > 1:
                seen.raised.append(Raised(type(error).__name__, (), str(error)))
                return
            raise
        if seen.ended:
            return
        self.losses.append(loss)
        seen.kept.append(position)
        if position in case.reads and not is_again and not self.read(loss):
            return
        if len(seen.kept) % case.accumulate == 0:
            self.survive(self.opt.step)

    def read(self, loss: pd2.Loss) -> bool:
        """Whether the train_step is kept so far. In processes the next call takes it back."""
        try:
            loss.item()
        except StageError as error:
            self.note(error)
            return False
        except RuntimeError:
            # Stages that read different versions, and make updates together, need later batches.
            case = self.case
            together = case.schedule == "pipedream" and (case.has_verdicts or case.tied)
            if not together or case.sizes.num_stages < 3:
                raise
        return True

    def evaluate(self, position: int) -> None:
        x, tags = self.given[position].args
        self.pipe.eval()
        try:
            with torch.no_grad():
                self.pipe(x, tags)
        finally:
            self.pipe.train()


def _read_what_is_left(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, seen: Seen, case: Case
) -> None:
    """After a failure that ends the pipeline."""
    state = copy_of(pipe.state_dict())
    opt.state_dict()
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        seen.wrong = "state_dict() after the end is not finite"
    try:
        pipe.flush()
    except StageError:
        pass
    else:
        seen.wrong = "flush() after the end raised nothing"
    if case.world == 1:
        pipe.unsplit()


def batches_of(case: Case, replica: int) -> list[Batch]:
    return sample.batches(case.count, case.sizes.num_microbatches, seed=10 + replica)


# ---------------------------------------------------------------- optimizers and the oracle


def _optimizers(kind: str, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    given = list(parameters)
    if kind == "adamw":
        return [torch.optim.AdamW([{"params": given}], lr=0.01, eps=1e-3)]
    if kind == "muon":
        matrices = {"params": [p for p in given if p.ndim == 2]}
        others = {"params": [p for p in given if p.ndim != 2]}
        return [torch.optim.Muon([matrices], lr=0.01), torch.optim.SGD([others], lr=0.1)]
    return [torch.optim.SGD([{"params": given}], lr=0.1, momentum=0.5)]


def _optimizer_options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.clip == "norm":
        options["max_grad_norm"] = 0.05
    elif case.clip == "value":
        options["clip_grad_value"] = 0.01
    if case.scaled:
        options["loss_scale"] = pd2.LossScale(256.0, growth_interval=2)
    return options


class _Together(torch.optim.Optimizer):
    """Clips, adds up the gradients of a tied parameter's uses, and steps several optimizers."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.parameters = list(model.parameters())
        self.all = _optimizers(case.optimizer, self.parameters)
        super().__init__([{"params": self.parameters}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        uses: dict[nn.Parameter, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            uses.setdefault(getattr(parameter, "first_use", parameter), []).append(parameter)
        for first, all_uses in uses.items():
            gradients = [use.grad for use in all_uses if use.grad is not None]
            first.grad = sum(gradients[1:], start=gradients[0])
        if self.case.clip == "norm":
            nn.utils.clip_grad_norm_(list(uses), 0.05)
        elif self.case.clip == "value":
            nn.utils.clip_grad_value_(list(uses), 0.01)
        for first, all_uses in uses.items():
            for use in all_uses[1:]:
                assert first.grad is not None
                use.grad = first.grad.clone()
        for optimizer in self.all:
            optimizer.step()


def has_oracle(case: Case) -> bool:
    return case.precision is None and not case.scaled


def is_exact(case: Case) -> bool:
    """Whether sums keep their order."""
    num_sums = case.width * (2 if case.schedule in TWO_PIPELINES else 1)
    return case.optimizer != "adamw" and num_sums <= 2


def by_oracle(case: Case, seen: Seen) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The losses of each train_step and replica, and the weights, of the unsplit model."""
    d = case.sizes.num_stages
    made = sample.make_model(Failing(()), d, norm=case.norm, dropout=case.dropout, tied=case.tied)
    model = untied(made) if case.tied else made
    stages = [int(name.split(".")[0]) for name, _ in model.named_parameters()]
    oracle = Oracle(
        sample.Whole(model),
        _Together(case, model),
        case.sizes.num_microbatches,
        sample.loss_of(Failing(())),
        [case.delay[stage] for stage in stages],
        num_pipelines=2 if case.schedule in TWO_PIPELINES else 1,
        warmup_batches=case.warmup,
        late=case.late and [case.late[stage] for stage in stages],
        drawing=drawing,
    )
    replicas = [batches_of(case, replica) for replica in range(case.width)]
    losses: list[list[float]] = []
    n = case.accumulate
    for first in range(0, len(seen.kept) - n + 1, n):
        if first in seen.restarts:
            oracle.restart_delay()
        steps = [[of[position] for of in replicas] for position in seen.kept[first : first + n]]
        losses += oracle.train_together(steps)
    return losses, copy_of(model.state_dict())


def merged(by_rank: Sequence[Seen], case: Case) -> dict[str, torch.Tensor]:
    """The weights on the ranks of the first replica."""
    state: dict[str, torch.Tensor] = {}
    for seen in by_rank[: case.depth if case.world > 1 else 1]:
        state |= seen.state
    return state
