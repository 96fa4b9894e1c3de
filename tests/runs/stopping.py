"""One rank is stopped, killed or cut off at a random moment; the others must end by a deadline.

From outside: a process that a rank forks sends it the signal, so that it may hit any instruction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import RankResult, run_ranks
from tests.runs.network import on_network, switch, unplug
from tests.runs.transports import TRANSPORTS, over
from tests.samples.schedule_sizes import TWO_PIPELINES, sizes_for

GRACE_SECONDS = 3.0
"""By which the others may end later than the pipeline's timeout after the signal."""

LONGEST_SECONDS = 20.0
"""After which a process that has not ended, hangs."""

LONGEST_DELAYS = {
    "opening": 0.3,
    "training": 0.3,
    "evaluation": 0.3,
    "state_dict": 0.3,
    "making a Checkpointer": 0.3,
    "resume": 0.3,
    "save": 0.3,
    "closing": 0.05,
}
"""Seconds after which the signal comes at the latest, once what it shall hit has begun."""

MOMENTS = tuple(LONGEST_DELAYS)

UNPLUGGED = "unplugged"
"""Instead of a signal: the network drops all that goes to the rank and comes from it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Whom a signal hits when, and in what.

    Attributes:
        depth: ranks of a replica.
        sent: the signal's name, "SIGSTOP" or "SIGKILL"; or UNPLUGGED.
        moment: what the ranks do, over and over, when it comes.
        transport: unless UNPLUGGED, where each rank is on a machine of its own.
        delay: seconds after that has begun.
        tidy: whether the others close the pipeline and the process group, or just end.
    """

    schedule: str
    depth: int
    width: int
    victim: int
    sent: str
    moment: str
    transport: str
    delay: float
    clips: bool = False
    tidy: bool = True
    timeout: float = 3.0

    @property
    def world(self) -> int:
        return self.depth * self.width

    @property
    def limit(self) -> float:
        """Seconds from the signal to the end of the last other rank."""
        return self.timeout + GRACE_SECONDS


@dataclasses.dataclass(frozen=True)
class Survivor:
    """How a rank that got no signal ended; where one is unplugged, that one too.

    Attributes:
        kind: of the error that it raised.
        raised, ended: seconds since the signal.
    """

    rank: int
    exit_code: int
    kind: str
    text: str
    raised: float
    ended: float

    def is_typed(self) -> bool:
        return self.kind in ("StageError", "PeerLost", "PeerTimeout") and self.exit_code == 0


def survivors_of(case: Case) -> list[Survivor]:
    """Runs the case.

    Raises:
        RankError: a rank hung; with the stacks of all.
    """
    with switch() if case.sent == UNPLUGGED else contextlib.nullcontext() as at:
        results = run_ranks(
            over if at is None else on_network,
            case.world,
            args=(case.transport if at is None else at, one_is_hit, case, at),
            rendezvous="none",
            timeout=LONGEST_SECONDS + 25,
            expect_failure=at is None,
        )
    hit = case.victim if at is None else None
    return [_survivor(result) for result in results if result.rank != hit]


def _survivor(result: RankResult) -> Survivor:
    seen = result.value or {"kind": "none", "text": result.stderr, "raised": 0.0, "hit": 0.0}
    return Survivor(
        rank=result.rank,
        exit_code=result.exit_code,
        kind=seen["kind"],
        text=seen["text"],
        raised=seen["raised"] - seen["hit"],
        ended=result.ended - seen["hit"],
    )


# ---------------------------------------------------------------- in the ranks


def join_with_store_in_rank_0(rank: int, world: int) -> None:
    """As ``init_process_group`` does without torchrun: the store dies, or hangs, with rank 0."""
    port = Path("port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path("port.partial").write_text(str(store.port), encoding="ascii")
        Path("port.partial").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text("ascii")), is_master=False)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


class Signal:
    """A process that sends the signal to the one that makes this, once told that it is time.

    Args:
        at: the switch's process, where there is one.
    """

    def __init__(self, case: Case, at: int | None) -> None:
        self._is_time, told = os.pipe()
        self._tell: int | None = told
        victim = os.getpid()
        if os.fork() == 0:
            os.close(told)
            os.read(self._is_time, 1)
            time.sleep(case.delay)
            Path("hit.partial").write_text(str(time.time()))
            Path("hit.partial").rename("hit")
            if at is not None:
                unplug(case.victim, at)
                os._exit(0)
            os.kill(victim, getattr(signal, case.sent))
            # A stopped one is kept until the others have ended: whoever waits for it ends late.
            exits = [Path(f"exit{rank}") for rank in range(case.world) if rank != case.victim]
            last = time.monotonic() + LONGEST_SECONDS
            while time.monotonic() < last and not all(file.exists() for file in exits):
                time.sleep(0.05)
            os.kill(victim, signal.SIGKILL)
            os._exit(0)

    def come(self) -> None:
        """It is time."""
        if self._tell is not None:
            os.close(self._tell)
            self._tell = None


def one_is_hit(rank: int, world: int, case: Case, at: int | None) -> dict[str, Any]:
    """Does what the case says until an error ends it."""
    hit = Signal(case, at) if rank == case.victim else None
    come: Callable[[], None] = hit.come if hit else lambda: None
    if at is None:
        join_with_store_in_rank_0(rank, world)
    else:
        dist.init_process_group("gloo")  # by torchrun's variables: the store is in rank 0 as well
    dist.barrier()  # who is hit while others still join ends torch's joining, not ours
    kind = text = ""
    pipes: list[pd2.PipelineModule] = []
    try:
        while True:
            pipes[:] = [_opened(case, come)]
            _do(pipes[0], case, come)
    except RuntimeError as error:
        kind, text = type(error).__name__, str(error)
    raised = time.time()
    if case.tidy:
        for pipe in pipes:
            pipe.close()
        dist.destroy_process_group()
    last = time.monotonic() + LONGEST_SECONDS
    while not Path("hit").exists():
        if time.monotonic() > last:
            raise RuntimeError(f"it ended before the signal came: {kind}: {text}")
        time.sleep(0.01)
    return {"kind": kind, "text": text, "raised": raised, "hit": float(Path("hit").read_text())}


def _opened(case: Case, come: Callable[[], None]) -> pd2.PipelineModule:
    sizes = _sizes(case)
    layers = [nn.Linear(4, 4) for _ in range(sizes["num_stages"])]
    if case.moment == "opening":
        come()
    return pd2.PipelineModule(
        layers,
        mse_loss,
        schedule=case.schedule,
        width=case.width,
        example_args=(torch.zeros(1, 4),),
        timeout=case.timeout,
        **sizes,
    )


def _sizes(case: Case) -> dict[str, Any]:
    """Those that the schedule runs with on so many ranks."""
    for stages_per_rank in (1, 2):
        for sizes in sizes_for(case.schedule, stages_per_rank * case.depth):
            if sizes.stages_per_rank == stages_per_rank:
                return sizes.options()
    raise LookupError(f"{case.schedule} on {case.depth} ranks")


def _do(pipe: pd2.PipelineModule, case: Case, come: Callable[[], None]) -> None:
    x, y = torch.randn(2, 2 * pipe.num_microbatches, 4)
    optimizer = pd2.PipelineOptimizer(
        torch.optim.SGD(pipe.parameters(), lr=0.01), max_grad_norm=1.0 if case.clips else None
    )

    def train() -> None:
        pipe.train_step(x, target=y)
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad():
            pipe(x)

    def make() -> pd2.Checkpointer:
        return pd2.Checkpointer("run", pipe, optimizer, every=1, preempt=())

    def save(ckpt: pd2.Checkpointer) -> None:
        train()
        ckpt.step()

    train()
    match case.moment:
        case "training" | "opening" | "closing":
            action: Callable[[], Any] = train
        case "evaluation":
            action = evaluate
        case "state_dict":
            action = pipe.full_state_dict
        case "making a Checkpointer":
            action = lambda: make().close()  # noqa: E731
        case "resume":
            ckpt = make()
            save(ckpt)
            action = ckpt.resume
        case "save":
            action = partial(save, make())
        case _:
            raise ValueError(case.moment)
    if case.moment not in ("opening", "closing"):
        come()
        while True:
            action()
    train()
    if case.moment == "closing":
        come()
    pipe.close()


# ---------------------------------------------------------------- which cases there are


def every_case(
    depths: Sequence[int],
    widths: Sequence[int],
    schedules: Sequence[str],
    *,
    seed: int,
    timeout: float,
) -> Iterator[Case]:
    """Every victim with both signals; the seed chooses the moment and the rest."""
    for schedule, depth, width in itertools.product(schedules, depths, widths):
        if depth % 2 and schedule in TWO_PIPELINES:
            continue
        for victim, sent in itertools.product(range(depth * width), ("SIGSTOP", "SIGKILL")):
            chance = random.Random(f"{seed} {schedule} {depth} {width} {victim} {sent}")
            moment = chance.choice(MOMENTS)
            yield Case(
                schedule=schedule,
                depth=depth,
                width=width,
                victim=victim,
                sent=sent,
                moment=moment,
                transport=chance.choice(TRANSPORTS),
                delay=chance.uniform(0, LONGEST_DELAYS[moment]),
                clips=chance.random() < 0.5,
                tidy=chance.random() < 0.5,
                timeout=timeout,
            )
