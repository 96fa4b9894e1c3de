"""Options of all kinds at once, drawn at random: what they mean together, on the unsplit model.

Every option has an oracle of its own elsewhere. Here is one of all of them, which shares nothing
with the package, and a model that has what they are about. It is made of

    first, blocks.0 ... blocks.5, last

where ``last`` may have the weight of ``first``, blocks may be frozen, use a layer for some
microbatches only, and add losses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

import pipedream2bw as pd2
from tests.references.late_forwards import late_of_2bw
from tests.references.mixed_oracle import clip_norm, half_away, lowered
from tests.references.oracle import Batch
from tests.references.remedies import Corrected, Discounted
from tests.samples.models import WIDTH
from tests.samples.odd_optimizers import CountsInGroup, Together
from tests.samples.schedule_sizes import TWO_PIPELINES, V_SHAPED, Sizes, sizes_for
from tests.samples.tied_models import untied

Item = TypeVar("Item")
Choose = Callable[[Sequence[Item]], Item]
Named = Iterable[tuple[str, nn.Parameter]]
Raise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NUM_BLOCKS = 6
PARTS = ("first", *(f"blocks.{i}" for i in range(NUM_BLOCKS)), "last")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INIT_SCALE, GROWTH_INTERVAL = 256.0, 2
DISCOUNTED_BATCHES = 3
NUM_UPDATES = 5
HARMLESS = ("flush", "state_dict", "reload the optimizer")


@dataclasses.dataclass(frozen=True)
class Combination:
    """How a model is trained. ``rows`` are of each train_step; ``lengths`` add up to as many."""

    schedule: str
    sizes: Sizes
    cuts: tuple[str, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    averages: bool  # accumulate=, else no_sync()
    reduction: str
    precision: str | None
    split_master: bool
    narrow: bool  # 16-bit weights' gradients
    autocast: bool
    scaled: bool
    overflows: frozenset[int]  # train_steps
    clip: str
    norm_type: float
    optimizer: str
    staleness: str
    warmup: int
    recompute: Any
    tied: bool
    frozen: frozenset[str]
    norm: str
    gated: bool
    adds: bool
    between: tuple[str, ...]  # what is done before each train_step
    load_before: int  # an update, or none
    numbers: tuple[int, ...] = ()  # of microbatches, of each replica of one batch
    update_slots: int | None = None

    @property
    def delay(self) -> int:
        return int("2bw" in self.schedule)

    def delay_of(self, parameter: str) -> int:
        if self.schedule != "pipedream":
            return self.delay
        return self.sizes.num_stages - 1 - self.stage_of(parameter)

    @property
    def is_fresh(self) -> bool:
        return self.update_slots is not None or self.schedule == "2bw_fresh"

    @functools.cached_property
    def late(self) -> list[int]:
        """By stage, of a fresh schedule."""
        d, slots = self.sizes.num_stages, self.update_slots or 1
        waits_for_all = self.scaled or self.clip == "norm"
        tied = [0, d - 1] if self.is_tied_across else []
        backward = 3 if self.recompute is True or (self.recompute == "auto" and d > 1) else 2
        if self.schedule in ("2bw", "2bw_fresh"):
            return late_of_2bw(d, slots, waits_for_all=waits_for_all, tied=tied, backward=backward)
        schedule = pd2.make_schedule(self.schedule, *dataclasses.astuple(self.sizes))
        joint = [list(range(d))] * waits_for_all + [tied] * bool(tied)
        late = schedule.late_for_slots(slots, joint, backward=backward)
        most = max((late[stage] for stage in tied), default=0)
        return [most if stage in tied else number for stage, number in enumerate(late)]

    def stage_of(self, parameter: str) -> int:
        part = next(i for i, part in enumerate(PARTS) if parameter.startswith(part))
        return sum(PARTS.index(cut) <= part for cut in self.cuts)

    @property
    def low(self) -> torch.dtype | None:
        return DTYPES.get(str(self.precision))

    @property
    def is_tied_across(self) -> bool:
        return self.tied and "first" not in self.frozen and bool(self.cuts)

    @property
    def bound(self) -> float:
        return {"norm": 0.5, "value": 0.02}.get(self.clip, math.inf)

    def pipeline_options(self) -> dict[str, Any]:
        """Of PipelineModule."""
        return {
            "schedule": self.schedule,
            "stages_per_rank": self.sizes.stages_per_rank,
            "update_slots": self.update_slots,
            "split": list(self.cuts),
            "accumulate": self.lengths[0] if self.averages else 1,
            "loss_reduction": self.reduction,
            "precision": self.precision,
            "split_master": self.split_master,
            "gradient_dtype": torch.bfloat16 if self.narrow else None,
            "autocast": torch.bfloat16 if self.autocast else None,
            "warmup_batches": self.warmup,
            "recompute": self.recompute,
        }

    @property
    def is_corrected(self) -> bool:
        return self.staleness not in ("", "discount")

    @property
    def can_shard(self) -> bool:
        """Whether replicas may share out its optimizers' state."""
        looks_ahead = self.staleness == "nesterov"
        return not looks_ahead and self.optimizer != "own" and self.schedule not in TWO_PIPELINES

    @property
    def can_hook(self) -> bool:
        """Whether replicas may call a hook in place of adding up its gradients."""
        is_known = self.optimizer in ("sgd", "adamw") or (
            self.low is None and not self.is_corrected
        )
        waits = not self.is_fresh or self.scaled or self.clip == "norm"
        return is_known and waits and self.schedule not in (*TWO_PIPELINES, "pipedream")

    def optimizer_options(self) -> dict[str, Any]:
        """Of PipelineOptimizer."""
        remedies = {
            "discount": [pd2.LearningRateDiscount(DISCOUNTED_BATCHES)],
            "feedback": [pd2.ErrorFeedback(0.8)],
            "nesterov": [pd2.NesterovCorrection(0.7)],
            "both": [pd2.LearningRateDiscount(DISCOUNTED_BATCHES), pd2.ErrorFeedback(0.8)],
        }
        options: dict[str, Any] = {"staleness": remedies.get(self.staleness, ())}
        if self.scaled:
            options["loss_scale"] = pd2.LossScale(INIT_SCALE, growth_interval=GROWTH_INTERVAL)
        if self.clip == "norm":
            options |= {"max_grad_norm": self.bound, "norm_type": self.norm_type}
        elif self.clip == "value":
            options["clip_grad_value"] = self.bound
        return options


def draw(choose: Choose[Any], num_ranks: int | None = None) -> Combination:
    """A combination that the package takes; ``num_ranks``: of a replica, any if None."""
    fair = (False, True)
    sizes: list[Sizes] = []
    while not sizes:
        schedule = choose(["2bw", "2bw", "2bw", *pd2.schedule_names()])
        depths = [1, 2, 3, 4] if num_ranks is None else [num_ranks, 2 * num_ranks]
        depths += [len(PARTS)] if num_ranks is None and schedule in V_SHAPED else []
        found = [(depth, each) for depth in depths for each in sizes_of(schedule, depth)]
        sizes = [each for d, each in found if num_ranks in (None, d // each.stages_per_rank)]
    size = choose(sizes)
    m = size.num_microbatches
    cuts = list(PARTS[1:])
    while len(cuts) >= size.num_stages:
        cuts.remove(choose(cuts))
    averages = choose(fair)
    length = choose([1, 1, 2, 3])
    lengths = [length if averages else choose([1, 1, 2]) for _ in range(NUM_UPDATES)]
    count = sum(lengths)
    precision = choose([None, None, "bf16", "fp16", "fp32"])
    optimizer = choose(["sgd", "sgd", "own", "several", "rmsprop", "adamw"])
    scaled = precision == "fp16" or choose([False, False, True])
    scaled = scaled and schedule != "pipedream"
    overflows = [choose(range(count)) for _ in range(choose([0, 1, 2]))] if scaled else []
    staleness = choose(["", "", "discount", "feedback", "nesterov", "both"])
    if "2bw" not in schedule:
        staleness = ""
    elif staleness == "nesterov" and (scaled or precision in DTYPES):
        staleness = "discount"
    update_slots = choose([None, None, 1, 2]) if "2bw" in schedule else None
    if staleness and (update_slots or schedule == "2bw_fresh"):
        staleness = "feedback"  # a discount is another one on each stage
    # What error feedback keeps is not saved.
    harmless = HARMLESS[:-1] if staleness in ("feedback", "both") else HARMLESS
    # Statistics are each pipeline's own, and stay NaN. A bias before them has a gradient that is
    # rounding alone, which most optimizers blow up.
    with_statistics = (
        schedule not in TWO_PIPELINES and not overflows and optimizer in ("sgd", "own")
    )
    norm = choose(["layer", "batch"] if with_statistics else ["layer", "none"])
    # Of two rows statistics make a difference of signs: rounding is then as large as any gradient.
    few = m * (4 if norm == "batch" else 2)
    of = Combination(
        schedule=schedule,
        sizes=size,
        cuts=tuple(cuts),
        lengths=tuple(lengths),
        rows=tuple(choose([few, few, few + 1, few + m]) for _ in range(count)),
        averages=averages,
        reduction=choose(["mean", "mean", "sum"]),
        precision=precision,
        split_master=precision == "bf16" and optimizer in ("sgd", "adamw") and choose(fair),
        narrow=precision == "bf16" and choose(fair),
        autocast=precision not in DTYPES and choose([False, False, True]),
        scaled=scaled,
        overflows=frozenset(overflows),
        clip=choose(["", "norm", "norm", "value"]),
        norm_type=choose([2.0, 2.0, 1.0, math.inf]),
        optimizer=optimizer,
        staleness=staleness,
        warmup=choose([0, 0, 1, 2]),
        recompute=choose([False, False, True, "auto", ["blocks.1", "blocks.4"]]),
        tied=choose(fair),
        frozen=frozenset(choose([(), (), ("blocks.0",), ("first", "blocks.0"), ("blocks.3",)])),
        norm=norm,
        gated=choose(fair),
        adds=choose(fair),
        between=tuple(choose(["", "", "", *harmless]) for _ in range(count)),
        load_before=choose([-1, -1, *range(1, NUM_UPDATES)]),
        update_slots=update_slots,
    )
    if of.is_fresh and max(of.late) > m:
        return dataclasses.replace(of, update_slots=1)
    return of


@functools.cache
def sizes_of(schedule: str, depth: int) -> list[Sizes]:
    """As ``sizes_for``, with two stages a rank at most and no long batches."""
    found = sizes_for(schedule, depth)
    return [each for each in found if each.stages_per_rank <= 2 and each.num_microbatches <= 9]


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """Its second layer is used where the first one's mean is positive."""

    def __init__(self, norm: str, raise_loss: Raise | None, *, gated: bool) -> None:
        super().__init__()
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.norm = norms[norm](WIDTH)
        self.linear, self.raise_loss, self.gated = nn.Linear(WIDTH, WIDTH), raise_loss, gated
        if gated:
            self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x)).tanh()
        if self.gated and float(y.detach().float().mean()) > 0:
            y = y + self.second(x)
        if self.raise_loss is not None:
            y = self.raise_loss(y, 0.1 * y.float().square().mean())
        return y


class Model(nn.Module):
    """A stack of blocks with a skip connection."""

    def __init__(self, of: Combination, raise_loss: Raise) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            Block(of.norm, raise_loss if of.adds and i % 2 else None, gated=of.gated and i % 3 == 1)
            for i in range(NUM_BLOCKS)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if of.tied:
            self.last.weight = self.first.weight
        for name in of.frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 3:
                x = x + first
        result: torch.Tensor = self.last(x)
        return result


def build(of: Combination, raise_loss: Raise = pd2.add_loss, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model(of, raise_loss)


def loss_of(reduction: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output.float(), target, reduction=reduction)
        return loss if reduction == "mean" else loss * 0.01

    return loss_fn


def batches_of(of: Combination, seed: int = 2, replica: int = 0) -> list[Batch]:
    """One for each train_step."""
    torch.manual_seed(seed)
    m = of.sizes.num_microbatches
    rows = [r * (of.numbers[replica] if of.numbers else m) // m for r in of.rows]
    batches = [Batch((torch.randn(r, WIDTH),), torch.randn(r, WIDTH)) for r in rows]
    for number in of.overflows:
        batches[number].args[0][0, 0] = math.inf
    return batches


def optimizers_of(kind: str, named: Named) -> list[torch.optim.Optimizer]:
    """Over what is trained; groups may be empty on a rank."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    matrices = {"params": [p for _, p in trained if p.ndim == 2]}
    vectors = {"params": [p for _, p in trained if p.ndim != 2]}
    undecayed = {**vectors, "weight_decay": 0.0}
    if kind == "own":
        return [CountsInGroup([matrices, vectors])]
    if kind == "several":
        return [RMSprop([matrices], lr=0.01), SGD([vectors], lr=0.1, momentum=0.5)]
    if kind == "rmsprop":
        return [RMSprop([matrices, undecayed], lr=0.01, weight_decay=0.1)]
    if kind == "adamw":
        return [AdamW([matrices, undecayed], lr=0.01, weight_decay=0.1, eps=1e-3, foreach=False)]
    return [SGD([matrices, undecayed], lr=0.1, momentum=0.5, weight_decay=0.1)]


def set_learning_rates(optimizer: torch.optim.Optimizer, first: Sequence[float], t: int) -> None:
    for group, lr in zip(optimizer.param_groups, first, strict=True):
        group["lr"] = lr * 0.8**t


# ---------------------------------------------------------------- what it means


class Definition:
    """Trains the unsplit model: W(t+1) from W(t) and the gradient at the version that t reads."""

    def __init__(self, of: Combination, num_replicas: int) -> None:
        self.of = of
        self.aside: list[torch.Tensor] = []

        def keep(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.aside.append(value)
            return x

        model = build(of, keep)
        # Every stage's uses of a tied parameter have a gradient, and these are added up.
        self.model = untied(model) if of.is_tied_across else model
        self.low = copy.deepcopy(self.model) if of.low is None else lowered(self.model, of.low)
        # Statistics are each replica's own.
        self.buffers = [self._buffers() for _ in range(num_replicas)]
        optimizer: torch.optim.Optimizer
        optimizer = Together(*optimizers_of(of.optimizer, self.model.named_parameters()))
        self.first_rates = [group["lr"] for group in optimizer.param_groups]
        self.corrected: Corrected | None = None
        if of.staleness in ("feedback", "both"):
            optimizer = self.corrected = Corrected(optimizer, "error feedback", 0.8, of.warmup)
        elif of.staleness == "nesterov":
            optimizer = self.corrected = Corrected(optimizer, "nesterov", 0.7, of.warmup)
        self.discounted: Discounted | None = None
        if of.staleness in ("discount", "both"):
            self.discounted = Discounted(optimizer, DISCOUNTED_BATCHES, of.warmup)
        self.optimizer = self.discounted or optimizer
        self.t = self.oldest = self.num_overflows = self.since_change = 0
        self.versions = [self._weights()]
        self.scales = [INIT_SCALE if of.scaled else 1.0]
        self.norms: list[float] = []

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.low.named_buffers()}

    @contextlib.contextmanager
    def _buffers_of(self, replica: int) -> Iterator[None]:
        for name, buffer in self.low.named_buffers():
            buffer.copy_(self.buffers[replica][name])
        yield
        self.buffers[replica] = self._buffers()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """The delay starts anew; moments, scales and the warm-up go on."""
        self.model.load_state_dict(state)
        for mine in self.buffers:
            mine.update({name: state[name].clone() for name in mine})
        self.versions[self.t], self.oldest = self._weights(), self.t
        if self.corrected is not None and self.t >= self.of.warmup:
            self.corrected.restart_delay()

    def version(self, delay: int) -> int:
        """What batch t reads."""
        if self.t < self.of.warmup:
            return self.t
        return max(self.t - delay, self.of.warmup - 1, self.oldest)

    def train(self, steps: Sequence[Sequence[Batch]]) -> list[list[float]]:
        """One update from train_steps of each replica; their losses."""
        of = self.of
        self._show(0)
        scale = self.scales[self.version(of.delay)]
        halves = 2 if of.schedule in TWO_PIPELINES else 1
        # Of each replica, and of each of its pipelines: they are added up in this order.
        sums: list[list[torch.Tensor | None]] = [
            [None for _ in self.low.parameters()] for _ in range(len(steps[0]) * halves)
        ]
        losses: list[list[float]] = []
        for step, batches in enumerate(steps):
            losses.append([])
            numbers = of.numbers or [of.sizes.num_microbatches] * len(batches)
            parts = [_split(*each) for each in zip(batches, numbers, strict=True)]
            total = torch.zeros(())
            for replica, part in enumerate(parts):
                if not of.numbers:
                    total = torch.zeros(())
                weighed = [x for each in parts for x in each] if of.numbers else part
                for j, microbatch in enumerate(part):
                    if of.is_fresh:
                        self._show(j if step == 0 else math.inf)
                    with self._buffers_of(replica):
                        loss = self._loss(microbatch)
                    seed = torch.full_like(loss, 1 if of.numbers else 1 / len(batches))
                    if of.averages and of.reduction == "mean" and len(steps) > 1:
                        seed = seed / len(steps)
                    added = sum(self.aside, start=loss)
                    self.aside.clear()
                    self.low.zero_grad(set_to_none=True)
                    added.backward(self._weighed(seed, microbatch, weighed) * scale)
                    mine = sums[replica * halves + j * halves // len(part)]
                    mine[:] = [
                        before if p.grad is None else _sum(before, self._kept(p.grad))
                        for before, p in zip(mine, self.low.parameters(), strict=True)
                    ]
                    total = total + self._weighed(loss.detach(), microbatch, weighed)
                losses[-1].append(total.item())
            if of.numbers:
                losses[-1] = losses[-1][-1:] * len(batches)
        gradients = [functools.reduce(_sum, of_one) for of_one in zip(*sums, strict=True)]
        if of.is_fresh and self.corrected is not None:
            each = of.numbers or [of.sizes.num_microbatches] * len(steps[0])
            count = sum(each) * len(steps)
            self.corrected.late_shares = {
                parameter: of.late[of.stage_of(name)] * len(each) / count
                for name, parameter in self.model.named_parameters()
            }
        self._update([None if g is None else g * (1 / scale) for g in gradients])
        return losses

    def _kept(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.of.narrow else gradient.float()

    def _show(self, microbatch: float) -> None:
        """What this microbatch of the batch reads."""
        of = self.of
        with torch.no_grad():
            for i, (name, parameter) in enumerate(self.low.named_parameters()):
                is_late = not of.is_fresh or microbatch < of.late[of.stage_of(name)]
                version = self.version(of.delay_of(name)) if is_late else self.t
                weight = self.versions[version][i]
                is_split = self.of.split_master and parameter.dtype == torch.bfloat16
                parameter.copy_(half_away(weight) if is_split else weight)

    def _loss(self, microbatch: Batch) -> torch.Tensor:
        x = microbatch.args[0].to(self.of.low)
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=self.of.autocast, cache_enabled=False
        ):
            return loss_of(self.of.reduction)(self.low(x), microbatch.target)

    def _weighed(
        self, value: torch.Tensor, microbatch: Batch, of_all: Sequence[Batch]
    ) -> torch.Tensor:
        if self.of.reduction == "sum":
            return value
        rows = [len(each.target) for each in of_all]
        if len(set(rows)) == 1:
            return value / len(rows)
        return value * (len(microbatch.target) / sum(rows))

    def _update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        of = self.of
        parameters = list(self.model.parameters())
        holders = list((self.low if of.narrow else self.model).parameters())
        holder_of = dict(zip(parameters, holders, strict=True))
        uses: dict[nn.Parameter, list[nn.Parameter]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            holder = holder_of[parameter]
            holder.grad = gradient
            uses.setdefault(holder_of[getattr(parameter, "first_use", parameter)], []).append(
                holder
            )
        for first, all_uses in uses.items():
            first.grad = functools.reduce(_sum, [use.grad for use in all_uses])
        finite = all(bool(p.grad.isfinite().all()) for p in uses if p.grad is not None)
        if of.clip == "norm" and finite:
            self.norms.append(float(clip_norm(list(uses), of.bound, of.norm_type)))
        elif of.clip == "norm":
            self.norms.append(math.nan)
        elif of.clip == "value":
            nn.utils.clip_grad_value_(list(uses), of.bound)
        for first, all_uses in uses.items():
            for use in all_uses[1:]:
                use.grad = None if first.grad is None else first.grad.clone()
        for parameter, holder in holder_of.items():
            parameter.grad = None if holder.grad is None else holder.grad.float()
        scale = self.scales[-1]
        set_learning_rates(self.optimizer, self.first_rates, self.t)
        if finite or not of.scaled:
            self.optimizer.step()
            self.since_change += 1
            if of.scaled and self.since_change == GROWTH_INTERVAL:
                scale, self.since_change = 2 * scale, 0
        else:
            self.num_overflows += 1
            scale, self.since_change = scale / 2, 0
            if self.discounted is not None:
                self.discounted.t += 1  # batches are counted
            if self.corrected is not None:
                self.corrected.skip()
        self.t += 1
        self.scales.append(scale)
        self.versions.append(self._weights())

    def state(self, replica: int) -> dict[str, torch.Tensor]:
        """The masters; what is not trained, and buffers, of the model that computes."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        trained = {name: p.detach() for name, p in parameters if p.requires_grad}
        return {**self.low.state_dict(), **self.buffers[replica], **trained}


def _split(batch: Batch, number: int) -> list[Batch]:
    x, target = batch.args[0].tensor_split(number), batch.target.tensor_split(number)
    return [Batch((each,), of_each) for each, of_each in zip(x, target, strict=True)]


def _sum(before: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or gradient is None:
        return gradient if before is None else before
    return before + gradient


# ---------------------------------------------------------------- both


@dataclasses.dataclass
class Outcome:
    """What can be compared."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    state: dict[str, torch.Tensor]


def by_definition(of: Combination, by_replica: Sequence[Sequence[Batch]]) -> list[Outcome]:
    """Of each replica; ``by_replica``: a batch for each train_step."""
    definition = Definition(of, len(by_replica))
    other = build(of, seed=7).state_dict()
    remaining = iter(zip(*by_replica, strict=True))
    losses: list[list[float]] = []
    for t, length in enumerate(of.lengths):
        if t == of.load_before:
            definition.load(other)
        losses += definition.train([next(remaining) for _ in range(length)])
    assert definition.num_overflows > 0 or not of.overflows
    norms, scales = definition.norms, definition.scales[1:] if of.scaled else []
    return [
        Outcome(list(mine), norms, scales, definition.state(replica))
        for replica, mine in enumerate(zip(*losses, strict=True))
    ]


def by_pipeline(
    of: Combination,
    batches: Sequence[Batch],
    *,
    shard_state: bool = False,
    hook: Any = None,
    **options: Any,
) -> Outcome:
    """``batches``: this replica's, one for each train_step."""
    other = build(of, seed=7).state_dict()
    with pd2.PipelineModule(
        build(of),
        loss_of(of.reduction),
        num_stages=of.sizes.num_stages,
        num_microbatches=of.numbers or of.sizes.num_microbatches,
        example_args=batches[0].args,
        timeout=60.0,
        **of.pipeline_options(),
        **options,
    ) as pipe:
        if hook is not None:
            pipe.register_comm_hook(None, hook)
        wrapped = optimizers_of(of.optimizer, pipe.named_parameters())
        opt = pd2.PipelineOptimizer(*wrapped, **of.optimizer_options(), shard_state=shard_state)
        first_rates = [group["lr"] for group in opt.param_groups]
        losses: list[Any] = []
        norms: list[Any] = []
        scales: list[Any] = []
        for t, length in enumerate(of.lengths):
            if t == of.load_before:
                pipe.load_state_dict(other)
            for k in range(length):
                disturb(of.between[len(losses)], pipe, opt)
                batch = batches[len(losses)]
                goes_on = not of.averages and k < length - 1
                with pipe.no_sync() if goes_on else contextlib.nullcontext():
                    losses.append(pipe.train_step(*batch.args, target=batch.target))
            set_learning_rates(opt, first_rates, t)
            opt.step()
            norms += [opt.grad_norm] if of.clip == "norm" else []
            scales += [opt.loss_scale] if of.scaled else []
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        return Outcome(*([float(x) for x in lazy] for lazy in (losses, norms, scales)), state)


def disturb(how: str, pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer) -> None:
    """By what changes no number."""
    if how == "flush":
        pipe.flush()
    elif how == "state_dict":
        pipe.state_dict()
        opt.state_dict()
    elif how == "reload the optimizer":
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def assert_alike(of: Combination, got: Outcome, want: Outcome) -> None:
    """To the bit but for AdamW's step; ``got`` may have a part of the state."""
    assert got.scales == want.scales
    exact = of.optimizer != "adamw"
    if exact:
        assert str(got.losses) == str(want.losses)
        assert str(got.norms).replace("inf", "nan") == str(want.norms)
    tolerance = 1e-5 if of.low is None and not of.autocast else 1e-3
    for ours, theirs in ((got.losses, want.losses), (got.norms, want.norms)):
        assert list(map(math.isfinite, ours)) == list(map(math.isfinite, theirs))
        finite = [(x, y) for x, y in zip(ours, theirs, strict=True) if math.isfinite(y)]
        mine, reference = torch.tensor(finite).reshape(-1, 2).unbind(1)
        assert (mine - reference).norm() <= tolerance * reference.norm()
    for name, tensor in got.state.items():
        reference = want.state[name]
        assert tensor.dtype == reference.dtype, name
        if exact:
            assert torch.equal(tensor, reference), name
        elif reference.is_floating_point():
            assert (tensor - reference).norm() <= tolerance * reference.norm(), name
