"""A training run that is killed and goes on, for as many lives as it takes."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import Folder
from pipedream2bw.optimizer.shares import is_divided
from tests.runs.launch import RankResult, run_ranks
from tests.samples.schedule_sizes import V_SHAPED

WIDTH = 6
ROWS = 24
FIRST_SEED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a run trains. What resumes it may differ in what ``ways`` say.

    Attributes:
        ways: numbers of ranks of a replica and stages of a rank that give the same bits.
        threads: whether one process may run it, too.
        shard_state: whether replicas share out the optimizer's state, in the first life and in some
            of the others.
        table: columns of a parameter that most of its stage consists of, so that replicas which
            share out state have elements of it; 0: the model has none.
    """

    schedule: str = "2bw"
    schedules: tuple[str, ...] = ()
    ways: tuple[tuple[int, int], ...] = ((2, 1), (3, 1), (1, 1))
    threads: bool = True
    width: int = 1
    num_microbatches: int | tuple[int, ...] = 6
    optimizer: str = "sgd"
    norm: bool = False
    precision: str | None = None
    split_master: bool = False
    loss_scale: bool = False
    shard_state: bool = False
    table: int = 0
    feedback: bool = False
    accumulate: int = 1
    batches: int = 24


SHARED = Setting(
    width=2,
    ways=((2, 1), (1, 1)),
    threads=False,
    precision="bf16",
    optimizer="adamw",
    shard_state=True,
)
SETTINGS = {
    "2bw sgd, batch norm": Setting(norm=True),
    "2bw adamw": Setting(optimizer="adamw"),
    "2bw muon, error feedback": Setting(optimizer="muon", feedback=True),
    "eager and split": Setting(
        schedule="2bw_eager", schedules=("2bw", "2bw_split", "2bw_eager"), ways=((2, 1), (3, 1))
    ),
    "1f1b and gpipe": Setting(schedule="1f1b", schedules=("gpipe", "1f1b"), optimizer="adamw"),
    "pipedream": Setting(schedule="pipedream", num_microbatches=1, ways=((3, 1),)),
    "interleaved": Setting(schedule="interleaved_2bw", ways=((2, 2), (3, 1)), threads=False),
    "chimera": Setting(schedule="chimera", num_microbatches=8, ways=((2, 1), (4, 1))),
    "bf16 masters": Setting(precision="bf16", optimizer="adamw"),
    "split masters": Setting(precision="bf16", split_master=True, optimizer="adamw"),
    "loss scale": Setting(precision="fp16", loss_scale=True, optimizer="adamw"),
    "replicas of 4 and 2 microbatches": Setting(
        width=2, num_microbatches=(4, 2), ways=((2, 1), (1, 1)), threads=False, norm=True
    ),
    "shares of the state": SHARED,
    "shares of one parameter": dataclasses.replace(SHARED, table=400, feedback=True),
    "V's, shares of the state": Setting(
        schedule="2bw_v_half",
        schedules=("2bw_v_half", "2bw_v", "2bw_v_min"),
        ways=((2, 2),),
        width=2,
        threads=False,
        optimizer="adamw",
        shard_state=True,
    ),
    "accumulate": Setting(accumulate=2, feedback=True),
}


class Table(nn.Module):
    """A large parameter, used twice."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, columns) / columns**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.table) @ self.table.t()


def make_model(setting: Setting, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [Table(setting.table)] if setting.table else []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH, bias=not setting.norm)]
        layers += [nn.BatchNorm1d(WIDTH)] if setting.norm else []
        layers += [nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers)


def make_optimizer(
    setting: Setting, pipe: pd2.PipelineModule, *, shard_state: bool
) -> pd2.PipelineOptimizer:
    parameters = list(pipe.parameters())
    optimizers: list[torch.optim.Optimizer]
    if setting.optimizer == "muon":
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        optimizers = [torch.optim.Muon([{"params": matrices}], lr=0.01)]
        optimizers += [torch.optim.AdamW([{"params": others}], lr=0.01)]
    elif setting.optimizer == "adamw":
        optimizers = [torch.optim.AdamW(parameters, lr=0.01)]
    else:
        optimizers = [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
    return pd2.PipelineOptimizer(
        *optimizers,
        staleness=pd2.ErrorFeedback() if setting.feedback else (),
        loss_scale=pd2.LossScale(init_scale=2.0**14, growth_interval=3)
        if setting.loss_scale
        else None,
        shard_state=shard_state,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """One life of a run.

    Attributes:
        ranks, stages: of a replica's, and of a rank's.
        in_threads: whether one process runs all stages.
        every: batches from one save to the next.
        victims: ranks to kill; empty: the run goes on to its end.
        since, after: when they are killed: so many seconds after the beginning of the "opening", of
            the "training" or of the "closing".
        signal: by which.
        seed: of weights and random numbers where there is a checkpoint to go on from, which brings
            its own; else they are those of :data:`FIRST_SEED`.
        shard_state: whether replicas share out the optimizer's state.
    """

    schedule: str
    ranks: int
    stages: int
    in_threads: bool = False
    every: int = 3
    victims: tuple[int, ...] = ()
    since: str = "training"
    after: float = 0.0
    signal: int = signal.SIGKILL
    seed: int = FIRST_SEED
    shard_state: bool = False


def data_of(setting: Setting) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    numbers = torch.randn(2, 60, WIDTH, generator=generator)
    return list(zip(numbers[0], numbers[1], strict=True))


class _Diary:
    """What a rank says on its standard output of its life, and when it is killed in it."""

    def __init__(self, rank: int, life: Life) -> None:
        self._life = life
        self._is_victim = rank in life.victims
        self._timer = threading.Timer(life.after, os.kill, (os.getpid(), life.signal))
        self._timer.daemon = True

    def begin(self, part: str) -> None:
        """Begins a part of the life."""
        self.tell(part)
        if self._is_victim and self._life.since == part:
            self._timer.start()

    def tell(self, what: str, number: int = 1) -> None:
        print(what, number, flush=True)

    def end(self) -> None:
        self._timer.cancel()


def told(result: RankResult) -> dict[str, int]:
    """What a rank has told last of each: "start", "batch" and the parts of its life."""
    lines = (line.split() for line in result.stdout.splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}


def live(rank: int, world: int, setting: Setting, life: Life, folder: str) -> dict[str, Any]:
    """Trains from the newest checkpoint on; gives losses and, at the end, the state."""
    torch.set_num_threads(1)
    diary = _Diary(rank, life)
    if world > 1:
        dist.barrier()  # all have the process group, whose making ends late without one of them
    diary.begin("opening")
    model = make_model(setting, life.seed if steps_in(Folder(folder)) else FIRST_SEED)
    x = torch.zeros(2, WIDTH)
    kinds: dict[str, Any] = {}
    if life.schedule.startswith("interleaved") or life.schedule in V_SHAPED:
        kinds["stages_per_rank"] = life.stages
    pipe = pd2.PipelineModule(
        model,
        F.mse_loss,
        num_stages=life.ranks * life.stages,
        num_microbatches=setting.num_microbatches,
        schedule=life.schedule,
        width=setting.width,
        example_args=(x,),
        precision=setting.precision,
        split_master=setting.split_master,
        accumulate=setting.accumulate,
        timeout=20.0,
        **kinds,
    )
    opt = make_optimizer(setting, pipe, shard_state=life.shard_state)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 5, 0.9)
    rows = data_of(setting)
    sampler = pd2.ResumableSampler(
        len(rows),
        ROWS,
        width=pipe.width,
        replica=pipe.replica,
        num_microbatches=pipe.microbatches_per_replica,
        seed=5,
    )
    losses: dict[int, Any] = {}
    preempt = [] if life.signal == signal.SIGKILL else [signal.Signals(life.signal).name]
    with pd2.Checkpointer(
        folder,
        pipe,
        opt,
        data=sampler,
        schedulers=[schedule],
        every=life.every,
        keep=2,
        preempt=preempt,
    ) as ckpt:
        diary.begin("resuming")
        start = ckpt.resume()
        diary.tell("start", start)
        diary.begin("training")
        batches = (each for _ in range(1000) for each in sampler)
        for t in range(start, setting.batches):
            for part in range(setting.accumulate):
                chosen = [rows[i] for i in next(batches)]
                x, y = (torch.stack(column) for column in zip(*chosen, strict=True))
                losses[t * setting.accumulate + part] = pipe.train_step(x, target=y)
                sampler.advance()
            opt.step()
            schedule.step()
            diary.tell("batch", t + 1)
            ckpt.step()
        diary.begin("closing")
    pipe.flush()
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    moments = {
        f"{name}/{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for name, of_one in _named_state(opt).items()
        for key, value in of_one.items()
    }
    weights = [stage.weights for stage in pipe.session.stages]
    cut = [n for each in weights for i, n in enumerate(each.trainable) if is_divided(each, i)]
    result = {
        "start": start,
        "cut": cut,
        "losses": {t: float(loss) for t, loss in losses.items()},
        "state": state if pipe.replica == 0 else {},
        "moments": moments,
        "buffers": {n: b.clone() for n, b in pipe.named_buffers()},
        "replica": pipe.replica,
    }
    pipe.close()
    diary.end()
    return result


def _named_state(opt: pd2.PipelineOptimizer) -> dict[str, Any]:
    """By name; whole, also of parameters of which this replica steps some elements."""
    found = opt.state_dict()
    return {n: of for each in found.get("optimizers", [found]) for n, of in each["state"].items()}


def run_life(setting: Setting, life: Life, folder: Path | str) -> list[RankResult]:
    """All ranks of a life.

    Args:
        folder: of the checkpoints, or its URL.
    """
    world = 1 if life.in_threads else life.ranks * setting.width
    return run_ranks(
        live,
        world,
        args=(setting, life, str(folder)),
        rendezvous="file" if world > 1 else "none",
        timeout=60,
        expect_failure=bool(life.victims),
    )


def whole_of(results: Sequence[RankResult]) -> dict[str, Any]:
    """What all ranks have at the end."""
    whole: dict[str, Any] = {"state": {}, "moments": {}, "losses": {}, "buffers": {}}
    for result in results:
        value = result.value
        whole["state"].update(value["state"])
        whole["moments"].update(value["moments"])
        whole["losses"].update({(value["replica"], t): x for t, x in value["losses"].items()})
        whole["buffers"].update({(value["replica"], n): b for n, b in value["buffers"].items()})
    return whole


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Names of what differs in a bit."""
    found = []
    for kind in ("state", "moments", "buffers"):
        if set(got[kind]) != set(want[kind]):
            found.append(f"{kind}: {sorted(set(got[kind]) ^ set(want[kind]), key=str)}")
        for name, value in got[kind].items():
            other = want[kind].get(name)
            same = (
                torch.equal(value, other)
                if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
                else value == other
            )
            if not same:
                found.append(f"{kind} {name}")
    found += [f"loss {t}" for t, loss in got["losses"].items() if want["losses"][t] != loss]
    return found


def first_life(setting: Setting) -> Life:
    ranks, stages = setting.ways[0]
    return Life(
        schedule=setting.schedule,
        ranks=ranks,
        stages=stages,
        every=1000,
        shard_state=setting.shard_state,
    )


def random_life(
    setting: Setting, draw: random.Random, *, by: int | None, anywhere: bool = False
) -> Life:
    """A life in one of the ways that give the same bits.

    Args:
        by: the signal that ends it early; None: it lives to its end.
        anywhere: whether it may also end while the pipeline opens or closes.
    """
    ranks, stages = draw.choice(setting.ways)
    schedules = setting.schedules or (setting.schedule,)
    in_threads = setting.threads and draw.random() < 0.3
    world = 1 if in_threads else ranks * setting.width
    victims: tuple[int, ...] = ()
    if by is not None:
        victims = tuple(range(world)) if draw.random() < 0.3 else (draw.randrange(world),)
    since, seconds = "training", 0.25
    if anywhere:
        since, seconds = draw.choices(
            [("training", 0.25), ("opening", 1.0), ("closing", 0.05)], [6, 3, 1]
        )[0]
    return Life(
        schedule=draw.choice(schedules),
        ranks=ranks,
        stages=stages,
        in_threads=in_threads,
        every=draw.choice((1, 2, 3, 5)),
        victims=victims,
        since=since,
        after=draw.uniform(0.0, seconds),
        signal=by or signal.SIGKILL,
        seed=draw.randrange(2**31),
        shard_state=setting.shard_state and draw.random() < 0.7,
    )
