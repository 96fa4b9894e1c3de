"""Options of all kinds at once, drawn at random: what they mean together, on the unsplit model.

Every option has an oracle of its own elsewhere. Here is one of all of them, which shares nothing
with the package, and a model that has what they are about. It is made of

    first, blocks.0 ... blocks.5, last

where ``last`` may have the weight of ``first``, blocks may be frozen, use a layer for some
microbatches only, drop out values, and add losses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import pipedream2bw as pd2
from tests.references.late_forwards import late_of_2bw
from tests.references.mixed_oracle import clip_norm, half_away, lowered, masters_of
from tests.references.oracle import Batch
from tests.references.remedies import Corrected, Discounted
from tests.samples.models import WIDTH
from tests.samples.odd_optimizers import CountsInGroup, Lookahead, Together
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
RANDOM_SEED = 12


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
    dropout: float = 0.0
    shifts: bool = False  # by an argument that every microbatch gets whole
    normalizer: str = ""  # "number": each train_step's; "function": of its target
    measures: bool = False  # a metric
    half: bool = False  # autocast to float16
    further: tuple[tuple[str, Any], ...] = ()
    """Options of PipelineModule by their names that change no number."""

    @property
    def is_exact(self) -> bool:
        """Whether stock torch computes the same bits."""
        return self.optimizer not in ("adam", "adamw") and "compile" not in dict(self.further)

    @property
    def num_accumulated(self) -> int:
        return self.lengths[0] if self.averages else 1

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
            "accumulate": self.num_accumulated,
            "loss_reduction": self.reduction,
            "precision": self.precision,
            "split_master": self.split_master,
            "gradient_dtype": torch.bfloat16 if self.narrow else None,
            "autocast": (torch.float16 if self.half else torch.bfloat16) if self.autocast else None,
            "warmup_batches": self.warmup,
            "recompute": self.recompute,
            "normalizer": {"number": True, "function": weight_of}.get(self.normalizer, False),
            "metrics": {"spread": spread} if self.measures else None,
            "replicated": ["shift"] if self.shifts else (),
            **dict(self.further),
        }

    def keywords(self) -> dict[str, torch.Tensor]:
        """Of the model's call."""
        return {"shift": SHIFT} if self.shifts else {}

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
        feedback = pd2.ErrorFeedback(0.8)
        remedies = {
            "discount": [pd2.LearningRateDiscount(DISCOUNTED_BATCHES)],
            "feedback": [feedback],
            "nesterov": [pd2.NesterovCorrection(0.7)],
            "both": [pd2.LearningRateDiscount(DISCOUNTED_BATCHES), feedback],
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

SHIFT = torch.linspace(-0.2, 0.2, WIDTH)


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric."""
    return (output.float() - target).abs().mean()


def weight_of(target: torch.Tensor) -> int:
    """A normalizer."""
    return 3 * len(target)


class Block(nn.Module):
    """Its second layer is used where the first one's mean is positive."""

    def __init__(
        self, norm: str, raise_loss: Raise | None, *, gated: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}
        self.norm = norms[norm](WIDTH)
        self.linear, self.raise_loss, self.gated = nn.Linear(WIDTH, WIDTH), raise_loss, gated
        if gated:
            self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(self.norm(x)).tanh())
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
            Block(
                of.norm,
                raise_loss if of.adds and i % 2 else None,
                gated=of.gated and i % 3 == 1,
                dropout=of.dropout * (i % 2),
            )
            for i in range(NUM_BLOCKS)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if of.tied:
            self.last.weight = self.first.weight
        for name in of.frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        first = x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 3:
                x = x + first
            if i == 4 and shift is not None:
                x = x + shift
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


Group = dict[str, Any]
OTHER_OPTIMIZERS: dict[str, Callable[[Group, Group], list[torch.optim.Optimizer]]] = {
    "adam": lambda a, b: [Adam([a, b], lr=0.01, eps=1e-3, amsgrad=True, foreach=False)],
    "heavy": lambda a, b: [SGD([a, b], lr=0.05, momentum=0.9, nesterov=True, maximize=False)],
    "adadelta": lambda a, b: [torch.optim.Adadelta([a, b], lr=0.5)],
    "adafactor": lambda a, b: [torch.optim.Adafactor([a, b], lr=0.01)],
    "adagrad": lambda a, b: [torch.optim.Adagrad([a, b], lr=0.05, lr_decay=0.1)],
    "adamax": lambda a, b: [torch.optim.Adamax([a, b], lr=0.01)],
    "asgd": lambda a, b: [torch.optim.ASGD([a, b], lr=0.05, t0=2)],
    "muon": lambda a, b: [torch.optim.Muon([a], lr=0.01), SGD([b], lr=0.1)],
    "nadam": lambda a, b: [torch.optim.NAdam([a, b], lr=0.01)],
    "radam": lambda a, b: [torch.optim.RAdam([a, b], lr=0.01)],
    "rprop": lambda a, b: [torch.optim.Rprop([a, b], lr=0.01)],
    "lookahead": lambda a, b: [Lookahead(SGD([a, b], lr=0.1, momentum=0.5))],
}
"""Of matrices and of vectors."""


FOREIGN = (
    *(
        "ADOPT",
        "AdEMAMix",
        "AdaBelief",
        "AdaBound",
        "AdamP",
        "Adan",
        "Aida",
        "Amos",
        "CAME",
        "FTRL",
    ),
    *(
        "DiffGrad",
        "Fromage",
        "Grams",
        "LARS",
        "LaProp",
        "Lamb",
        "Lion",
        "NovoGrad",
        "PNM",
        "QHAdam",
    ),
    *("Ranger", "SGDP", "SOAP", "SignSGD", "StableAdamW", "Tiger", "Yogi"),
)
"""Of the package pytorch-optimizer: those that step each parameter as if it were the only one."""


def foreign_optimizers() -> tuple[str, ...]:
    """Those that are installed."""
    return FOREIGN if importlib.util.find_spec("pytorch_optimizer") else ()


def optimizers_of(kind: str, named: Named) -> list[torch.optim.Optimizer]:
    """Over what is trained; groups may be empty on a rank."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    matrices = {"params": [p for _, p in trained if p.ndim == 2]}
    vectors = {"params": [p for _, p in trained if p.ndim != 2]}
    undecayed = {**vectors, "weight_decay": 0.0}
    if kind in FOREIGN:
        make = getattr(importlib.import_module("pytorch_optimizer"), kind)
        return [make([matrices, vectors], lr=0.01)]
    if kind in OTHER_OPTIMIZERS:
        return OTHER_OPTIMIZERS[kind](matrices, vectors)
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


@dataclasses.dataclass
class Evaluation:
    """Of one batch, by the newest weights; ``output``: where the last stage is."""

    loss: float
    metric: float
    output: torch.Tensor | None


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
            if not of.split_master:
                self.corrected.masters = masters_of(self.model, self.low)
        elif of.staleness == "nesterov":
            optimizer = self.corrected = Corrected(optimizer, "nesterov", 0.7, of.warmup)
        self.discounted: Discounted | None = None
        if of.staleness in ("discount", "both"):
            self.discounted = Discounted(optimizer, DISCOUNTED_BATCHES, of.warmup)
        self.optimizer = self.discounted or optimizer
        self.t = self.oldest = self.num_overflows = self.since_change = self.num_steps = 0
        self.versions = [self._weights()]
        self.scales = [INIT_SCALE if of.scaled else 1.0]
        self.norms: list[float] = []

    def _weights(self) -> list[torch.Tensor]:
        ahead = {} if self.corrected is None else self.corrected.ahead
        return [ahead.get(p, p).detach().clone() for p in self.model.parameters()]

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
        self.forget_versions()

    def forget_versions(self) -> None:
        """The next batch reads what is rounded from the masters."""
        if self.corrected is not None:
            self.corrected.ahead.clear()
        self.versions[self.t] = self._weights()
        self.restart_delay()

    def restart_delay(self) -> None:
        """The next batch reads the newest weights, as after a batch that was discarded."""
        self.oldest = self.t
        if self.corrected is not None and self.t >= self.of.warmup:
            self.corrected.restart_delay()

    def become(self, of: Combination, num_replicas: int) -> None:
        """Goes on as another layout does that loads what this one has saved."""
        if of.delay > self.of.delay:
            self.restart_delay()  # only the newest weights were saved
        first, *others = self.buffers
        added = [dict(first) for _ in range(num_replicas - len(self.buffers))]
        self.of, self.buffers = of, [first, *others, *added][:num_replicas]

    def version(self, delay: int) -> int:
        """What batch t reads."""
        if self.t < self.of.warmup:
            return self.t
        return max(self.t - delay, self.of.warmup - 1, self.oldest)

    def train(self, steps: Sequence[Sequence[Batch]]) -> list[list[float]]:
        """One update from train_steps of each replica; their losses."""
        of = self.of
        self.normalizer = sum(weight_of(each.target) for batches in steps for each in batches)
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
                if not self.is_one_batch:
                    total = torch.zeros(())
                weighed = [x for each in parts for x in each] if self.is_one_batch else part
                for j, microbatch in enumerate(part):
                    if of.is_fresh:
                        self._show(j if step == 0 else math.inf)
                    with self._buffers_of(replica), self._drawing(sum(numbers[:replica]) + j):
                        loss = self._loss(microbatch)
                    seed = torch.full_like(loss, 1 if self.is_one_batch else 1 / len(batches))
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
            if self.is_one_batch:
                losses[-1] = losses[-1][-1:] * len(batches)
            self.num_steps += 1
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

    @property
    def is_one_batch(self) -> bool:
        """Whether what the replicas are given has one loss."""
        return bool(self.of.numbers or self.of.normalizer)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Evaluation]:
        """What each replica gets of its batch, by the newest weights."""
        of, found, total, measured = self.of, [], torch.zeros(()), torch.zeros(())
        numbers = of.numbers or [of.sizes.num_microbatches] * len(batches)
        parts = [_split(*each) for each in zip(batches, numbers, strict=True)]
        self.normalizer = sum(weight_of(each.target) for each in batches)
        self._show_newest()
        self.low.eval()
        for replica, part in enumerate(parts):
            if not self.is_one_batch:
                total, measured = torch.zeros(()), torch.zeros(())
            weighed = [x for each in parts for x in each] if self.is_one_batch else part
            rows = sum(len(each.target) for each in weighed)
            outputs = []
            for microbatch in part:
                with self._buffers_of(replica), self._autocast():
                    outputs.append(self._output(microbatch))
                    loss = loss_of(of.reduction)(outputs[-1], microbatch.target)
                    value = spread(outputs[-1], microbatch.target)
                total = total + self._weighed(loss, microbatch, weighed)
                measured = measured + value * (len(microbatch.target) / rows)
            self.aside.clear()
            found.append(Evaluation(total.item(), measured.item(), torch.cat(outputs)))
        self.low.train()
        if self.is_one_batch:
            return [
                dataclasses.replace(each, loss=found[-1].loss, metric=found[-1].metric)
                for each in found
            ]
        return found

    def _drawing(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        if not self.of.dropout:
            return contextlib.nullcontext()
        return pd2.reference_random(
            seed=RANDOM_SEED, train_step=self.num_steps, microbatch=microbatch
        )

    def _kept(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.of.narrow else gradient.float()

    def _show(self, microbatch: float) -> None:
        """What this microbatch of the batch reads."""
        of = self.of
        with torch.no_grad():
            for i, (name, parameter) in enumerate(self.low.named_parameters()):
                is_late = not of.is_fresh or microbatch < of.late[of.stage_of(name)]
                version = self.version(of.delay_of(name)) if is_late else self.t
                self._show_one(parameter, self.versions[version][i])

    def _show_newest(self) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.low.parameters(), self.versions[-1], strict=True):
                self._show_one(parameter, weight)

    def _show_one(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        is_split = self.of.split_master and parameter.dtype == torch.bfloat16
        parameter.copy_(half_away(weight) if is_split else weight)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = torch.float16 if self.of.half else torch.bfloat16
        return torch.autocast("cpu", dtype=dtype, enabled=self.of.autocast, cache_enabled=False)

    def _output(self, microbatch: Batch) -> torch.Tensor:
        arguments = {name: value.to(self.of.low) for name, value in self.of.keywords().items()}
        output: torch.Tensor = self.low(microbatch.args[0].to(self.of.low), **arguments)
        return output

    def _loss(self, microbatch: Batch) -> torch.Tensor:
        with self._autocast():
            return loss_of(self.of.reduction)(self._output(microbatch), microbatch.target)

    def _weighed(
        self, value: torch.Tensor, microbatch: Batch, of_all: Sequence[Batch]
    ) -> torch.Tensor:
        if self.of.normalizer:
            return value / self.normalizer
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
        state = {**self.low.state_dict(), **self.buffers[replica], **trained}
        return {name: tensor.clone() for name, tensor in state.items()}


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
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Phase:
    """What one pipeline trains of a run: the next one goes on with what this one has saved."""

    of: Combination
    updates: range
    width: int = 1
    is_new: bool = False  # only the newest weights were saved


def by_definition(of: Combination, by_replica: Sequence[Sequence[Batch]]) -> list[Outcome]:
    """Of each replica; ``by_replica``: a batch for each train_step."""
    return phases_by_definition([Phase(of, range(NUM_UPDATES), len(by_replica))], [by_replica])[-1]


def phases_by_definition(
    phases: Sequence[Phase], by_phase: Sequence[Sequence[Sequence[Batch]]]
) -> list[list[Outcome]]:
    """Of each phase, and of each of its replicas."""
    definition = Definition(phases[0].of, phases[0].width)
    other = build(phases[0].of, seed=7).state_dict()
    found = []
    for phase, by_replica in zip(phases, by_phase, strict=True):
        definition.become(phase.of, phase.width)
        if phase.is_new:
            definition.forget_versions()
        losses, evaluations = _train_phase(definition, phase, by_replica, other)
        norms, scales = definition.norms, definition.scales[1:] if phase.of.scaled else []
        found.append(
            [
                Outcome(list(mine), list(norms), scales, definition.state(replica), list(of_one))
                for replica, (mine, of_one) in enumerate(
                    zip(zip(*losses, strict=True), evaluations, strict=True)
                )
            ]
        )
    assert definition.num_overflows > 0 or not phases[0].of.overflows
    return found


def _train_phase(
    definition: Definition,
    phase: Phase,
    by_replica: Sequence[Sequence[Batch]],
    other: dict[str, torch.Tensor],
) -> tuple[list[list[float]], list[list[Evaluation]]]:
    of = phase.of
    number = sum(of.lengths[: phase.updates.start])
    losses: list[list[float]] = []
    evaluations: list[list[Evaluation]] = [[] for _ in by_replica]
    for t in phase.updates:
        if t == of.load_before:
            definition.load(other)
        steps = [[mine[number + k] for mine in by_replica] for k in range(of.lengths[t])]
        for k, batches in enumerate(steps):
            if of.between[number + k] == "evaluate" and k == 0:
                for mine, each in zip(evaluations, definition.evaluate(batches), strict=True):
                    mine.append(each)
        if of.between[number] == "discard":
            definition.restart_delay()
        losses += definition.train(steps)
        number += of.lengths[t]
    return losses, evaluations


def by_pipeline(
    of: Combination,
    batches: Sequence[Batch],
    *,
    shard_state: bool = False,
    hook: Any = None,
    **options: Any,
) -> Outcome:
    """``batches``: this replica's, one for each train_step."""
    with opened(of, batches, shard_state=shard_state, hook=hook, **options) as run:
        return run.train(range(NUM_UPDATES))


@contextlib.contextmanager
def opened(
    of: Combination,
    batches: Sequence[Batch],
    *,
    shard_state: bool = False,
    hook: Any = None,
    **options: Any,
) -> Iterator[Run]:
    """A pipeline of this combination, at the beginning."""
    with pd2.PipelineModule(
        build(of),
        loss_of(of.reduction),
        **{
            "num_stages": of.sizes.num_stages,
            "num_microbatches": of.numbers or of.sizes.num_microbatches,
            "example_args": batches[0].args,
            "example_kwargs": of.keywords(),
            "timeout": 60.0,
            **of.pipeline_options(),
            **options,
        },
    ) as pipe:
        if hook is not None:
            pipe.register_comm_hook(None, hook)
        if of.dropout:
            pipe.session.random_seed = RANDOM_SEED
        wrapped = optimizers_of(of.optimizer, pipe.named_parameters())
        opt = pd2.PipelineOptimizer(*wrapped, **of.optimizer_options(), shard_state=shard_state)
        yield Run(of, batches, pipe, opt, [group["lr"] for group in opt.param_groups])


@dataclasses.dataclass
class Run:
    """A pipeline that trains ``batches``, one for each train_step."""

    of: Combination
    batches: Sequence[Batch]
    pipe: pd2.PipelineModule
    opt: pd2.PipelineOptimizer
    first_rates: list[float]
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)

    def train(
        self,
        updates: range,
        save: Callable[[], Any] = lambda: None,
        after_update: Callable[[], Any] = lambda: None,
    ) -> Outcome:
        """Trains these, and gives what came out of them.

        Args:
            save: called at the end, before anything is drained.
        """
        of, pipe, opt = self.of, self.pipe, self.opt
        number = sum(of.lengths[: updates.start])
        losses: list[Any] = []
        norms: list[Any] = []
        scales: list[Any] = []
        for t in updates:
            if t == of.load_before:
                pipe.load_state_dict(build(of, seed=7).state_dict())
            for k in range(of.lengths[t]):
                self._disturb(of.between[number], number, k)
                goes_on = not of.averages and k < of.lengths[t] - 1
                with pipe.no_sync() if goes_on else contextlib.nullcontext():
                    losses.append(
                        self._train_step(number, range(number - k, number - k + of.lengths[t]))
                    )
                number += 1
            set_learning_rates(opt, self.first_rates, t)
            opt.step()
            norms += [opt.grad_norm] if of.clip == "norm" else []
            scales += [opt.loss_scale] if of.scaled else []
            after_update()
        save()
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        read = [[float(x) for x in lazy] for lazy in (losses, norms, scales)]
        return Outcome(read[0], read[1], read[2], state, self.evaluations)

    def _train_step(self, number: int, of_batch: Iterable[int]) -> pd2.Loss:
        batch = self.batches[number]
        weight = sum(weight_of(self.batches[each].target) for each in of_batch)
        return self.pipe.train_step(
            *batch.args, target=batch.target, **self._counted(weight), **self.of.keywords()
        )

    def _counted(self, weight: int) -> dict[str, Any]:
        return {"normalizer": weight} if self.of.normalizer == "number" else {}

    def _disturb(self, how: str, number: int, k: int) -> None:
        pipe, opt = self.pipe, self.opt
        if how == "evaluate" and k == 0:
            self._evaluate(number)
        elif how == "discard" and k == 0:
            goes_on = max(self.of.lengths) > 1 and not self.of.averages
            with pipe.no_sync() if goes_on else contextlib.nullcontext():
                self._train_step(number, [number])
            assert len(pipe.discard_batch()) == 1
        elif how == "go back" and k == 0:
            self._go_back(number)
        elif how == "full_state_dict":
            pipe.full_state_dict()
        else:
            disturb(how, pipe, opt)

    def _evaluate(self, number: int) -> None:
        pipe, batch = self.pipe, self.batches[number]
        pipe.eval()
        output = pipe(*batch.args, **self.of.keywords())
        loss = pipe.eval_step(
            *batch.args,
            target=batch.target,
            **self._counted(weight_of(batch.target)),
            **self.of.keywords(),
        )
        pipe.train()
        metric = loss.metrics["spread"] if self.of.measures else math.nan
        self.evaluations.append(Evaluation(float(loss), float(metric), output))

    def _go_back(self, number: int) -> None:
        """Trains a batch more, and goes back to what was saved before it."""
        of, pipe, opt = self.of, self.pipe, self.opt
        with shared_folder() as folder:
            saving = pd2.save(folder, pipe, opt, extra={"number": number})
            saving.wait()
            for _ in range(of.num_accumulated):
                self._train_step(number, [number])
            opt.step()
            assert pd2.load(folder, pipe, opt) == {"number": number}


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A new folder, the same on all ranks."""
    in_ranks = dist.is_initialized()
    first = not in_ranks or dist.get_rank() == 0
    names = [tempfile.mkdtemp() if first else ""]
    if in_ranks:
        dist.broadcast_object_list(names)
    yield names[0]
    if in_ranks:
        dist.barrier()
    if first:
        shutil.rmtree(names[0])


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
    """To the bit but for steps of Adam; ``got`` may have a part of the state."""
    assert got.scales == want.scales
    exact = of.is_exact
    if exact:
        assert str(got.losses) == str(want.losses), f"losses: {got.losses}, {want.losses}"
        norms = str(got.norms).replace("inf", "nan")
        assert norms == str(want.norms), f"norms: {norms}, {want.norms}"
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
            distance = (tensor.float() - reference.float()).norm()
            assert torch.equal(tensor, reference), f"{name} differs by {distance}"
        elif reference.is_floating_point():
            assert (tensor - reference).norm() <= tolerance * reference.norm(), name
    assert len(got.evaluations) == len(want.evaluations)
    for mine_, theirs_ in zip(got.evaluations, want.evaluations, strict=True):
        _assert_evaluated(of, mine_, theirs_, tolerance)


def _assert_evaluated(of: Combination, got: Evaluation, want: Evaluation, tolerance: float) -> None:
    numbers = [(got.loss, want.loss, 0.0 if of.is_exact else tolerance)]
    numbers += [(got.metric, want.metric, max(tolerance, 1e-5))] * of.measures
    for ours, theirs, within in numbers:
        both = f"evaluated: {ours}, {theirs}"
        assert math.isfinite(ours) == math.isfinite(theirs), both
        assert not math.isfinite(theirs) or abs(ours - theirs) <= within * abs(theirs), both
    if got.output is not None:
        assert want.output is not None
        assert got.output.dtype == want.output.dtype
        within = 0.0 if of.is_exact else tolerance
        torch.testing.assert_close(
            got.output, want.output, rtol=within, atol=within, equal_nan=True
        )
