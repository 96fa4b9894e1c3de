"""Trainings of one small model on meshes of replicas, stages and shards, and in one process."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipedream2bw as pd2
from pipedream2bw.model.local_shards import as_local
from tests.references.mixed_oracle import MixedOracle, clip_norm, lowered, masters_of
from tests.references.oracle import Batch, Oracle
from tests.references.remedies import Corrected
from tests.runs.trajectory import copy_of, stage_of_parameters
from tests.samples.models import WIDTH
from tests.samples.tensor_parallel import (
    DIMENSIONS,
    NAMES,
    SHARDS_OF_BLOCK,
    Block,
    Forgetful,
    InTurn,
    Parallelized,
)

NUM_BLOCKS, M, ROWS = 4, 4, 16
BOUND = 0.5  # of a norm


class Shape(NamedTuple):
    """Of a mesh."""

    dp: int
    pp: int
    tp: int

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp}.pp{self.pp}.tp{self.tp}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        kind: whose modules cut parameters: "by hand", "forgetful" or "torch".
        tied: whether the last block has parameters of the first one.
    """

    shape: Shape
    schedule: str = "2bw"
    optimizer: str = "sgd"
    clips: bool = True
    kind: str = "by hand"
    tied: bool = False
    precision: str | None = None
    shard_state: bool = False
    feedback: bool = False
    scale: float | None = None
    count: int = 20

    def __str__(self) -> str:
        values = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        given = [f"{f.name}={value}" for f, value in values if value != f.default]
        return " ".join(given)

    @property
    def stages_per_rank(self) -> int:
        return 2 if "v" in self.schedule.split("_") or "interleaved" in self.schedule else 1

    @property
    def num_stages(self) -> int:
        return self.shape.pp * self.stages_per_rank

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision is None else torch.float32


class Result(NamedTuple):
    """What a process has at the end."""

    place: tuple[int, int, int]
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    late: tuple[int, ...]
    stage_of: dict[str, int]


def model_of(case: Case, tp: DeviceMesh | None, *, zeros: bool = False) -> nn.Sequential:
    """The model, or this process's shards of it."""
    torch.manual_seed(1)
    kind: Any = {"torch": Parallelized, "forgetful": Forgetful}.get(case.kind, Block)
    model = _tied(case, nn.Sequential(*(kind(tp) for _ in range(NUM_BLOCKS))))
    if tp is not None:
        model = pd2.use_local_shards(model, None if case.kind == "torch" else SHARDS_OF_BLOCK)
    for parameter in model.parameters() if zeros else ():
        nn.init.zeros_(parameter)
    return model


def reference_of(case: Case) -> nn.Sequential:
    """The unsplit model; in 16 bits it rounds as the shards do."""
    torch.manual_seed(1)
    shards = 1 if case.precision is None else case.shape.tp
    return _tied(case, nn.Sequential(*(InTurn(shards) for _ in range(NUM_BLOCKS))))


def _tied(case: Case, model: nn.Sequential) -> nn.Sequential:
    first, last = model.to(case.dtype)[0], model[-1]
    if case.tied:
        last.bias = first.bias
        if isinstance(first, Parallelized):
            last.first.weight = first.first.weight
        else:
            last.up = first.up
    return model


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def batches_of(case: Case, replica: int | None = None) -> list[Batch]:
    """Of a replica, or whole."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(case.count):
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
        if replica is not None:
            x = x.chunk(case.shape.dp)[replica]
        found.append(Batch((x,), x.roll(1, 1).tanh()))
    return found


def open_run(
    case: Case, *, zeros: bool = False, timeout: float = 30.0
) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    shape = case.shape
    mesh = DeviceMesh(
        "cpu", torch.arange(shape.world).reshape(shape), mesh_dim_names=("dp", "pp", "tp")
    )
    tp = mesh["tp"]
    # torch keeps what it has found out about equal meshes, with the names of groups that are gone:
    # to be equal they must be of one thread.
    tp._thread_id, tp._hash = time.monotonic_ns(), None
    pipe = pd2.PipelineModule(
        model_of(case, tp if shape.tp > 1 else None, zeros=zeros),
        nn.functional.mse_loss,
        num_stages=case.num_stages,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank if case.stages_per_rank > 1 else None,
        num_microbatches=M,
        example_args=batches_of(case, 0)[0].args,
        mesh=mesh if shape.world > 1 else None,
        precision=case.precision,
        split=[str(i * NUM_BLOCKS // case.num_stages) for i in range(1, case.num_stages)],
        timeout=timeout,
    )
    opt = pd2.PipelineOptimizer(
        optimizer_of(case, pipe.parameters()),
        max_grad_norm=BOUND if case.clips else None,
        shard_state=case.shard_state,
        staleness=pd2.ErrorFeedback() if case.feedback else (),
        loss_scale=None if case.scale is None else pd2.LossScale(case.scale, growth_interval=3),
    )
    return pipe, opt


def go_on(
    case: Case, pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, first: int, end: int
) -> tuple[list[float], list[float]]:
    """Trains on these batches; gives losses and norms."""
    losses, norms = [], []
    for batch in batches_of(case, pipe.replica)[first:end]:
        losses.append(pipe.train_step(*batch.args, target=batch.target))
        opt.step()
        norms.append(opt.grad_norm if case.clips else 0.0)
    pipe.flush()
    return [float(loss) for loss in losses], [float(norm) for norm in norms]


def train(rank: int, world: int, case: Case) -> Result:
    pipe, opt = open_run(case)
    with pipe:
        return result_of(pipe, *go_on(case, pipe, opt, 0, case.count))


def train_until_refused(
    rank: int, world: int, case: Case, idle: int, folder: str | None = None
) -> tuple[int, str]:
    """How many steps were made until one was refused, and why; the first ones change nothing.

    Args:
        folder: the run first trains three batches, is saved there, and goes on from there.
    """
    pipe, opt = open_run(case)
    if folder is not None:
        with pipe:
            go_on(case, pipe, opt, 0, 3)
            pd2.save(folder, pipe, opt).wait()
        pipe, opt = open_run(case)
        pd2.load(folder, pipe, opt)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda batch: float(batch >= idle))
    with pipe:
        for number, batch in enumerate(batches_of(case, pipe.replica)):
            pipe.train_step(*batch.args, target=batch.target)
            try:
                opt.step()
            except ValueError as error:
                return number, str(error)
            schedule.step()
    return case.count, ""


def train_and_save(rank: int, world: int, case: Case, end: int, folder: str) -> Result:
    pipe, opt = open_run(case)
    with pipe:
        trained = go_on(case, pipe, opt, 0, end)
        pd2.save(folder, pipe, opt).wait()
        return result_of(pipe, *trained)


def load_and_train(
    rank: int, world: int, case: Case, first: int, folder: str, again: str
) -> Result:
    """Goes on with what was saved, and saves it once more before."""
    pipe, opt = open_run(case, zeros=True)
    with pipe:
        pd2.load(folder, pipe, opt)
        pd2.save(again, pipe, opt).wait()
        return result_of(pipe, *go_on(case, pipe, opt, first, case.count))


def go_on_until_killed(
    rank: int, world: int, case: Case, folder: str, victim: int | None, seconds: float
) -> tuple[int, Result]:
    """Goes on from the last checkpoint; gives where that was. One rank may be killed."""
    torch.set_num_threads(1)
    pipe, opt = open_run(case, zeros=True, timeout=5.0)
    with pipe:
        with torch.no_grad():  # what a run begins with where there is no checkpoint
            pipe.load_state_dict(model_of(case, None).state_dict())
        ckpt = pd2.Checkpointer(folder, pipe, opt, every=1, preempt=())
        ckpt.resume()
        first = pipe.session.accumulation.num_updates
        if rank == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        losses = []
        for batch in batches_of(case, pipe.replica)[first:]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            ckpt.step()
        ckpt.close()
        pipe.flush()
        return first, result_of(pipe, [float(loss) for loss in losses], [])


def save_by_torch(rank: int, world: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    pipe, opt = open_run(case)
    with pipe:
        go_on(case, pipe, opt, 0, case.count)
        dcp.save({"model": pipe, "optim": opt}, checkpoint_id=f"{folder}/objects")
        states = {"model": pipe.state_dict(), "optim": opt.state_dict()}
        dcp.save(states, checkpoint_id=f"{folder}/states")
        pd2.save(f"{folder}/ours", pipe, opt).wait()
        return pipe.full_state_dict()


def load_by_torch(rank: int, world: int, case: Case, folder: str) -> list[dict[str, torch.Tensor]]:
    """What was loaded by each kind's load, and as a file of weights."""
    whole = []
    for kind in ("objects", "states"):
        pipe, opt = open_run(case, zeros=True)
        with pipe:
            opt.init_state()
            dcp.load({"model": pipe, "optim": opt}, checkpoint_id=f"{folder}/{kind}")
            pd2.save(f"{folder}/{kind}-{case.shape}", pipe, opt).wait()
            whole.append(pipe.full_state_dict())
            go_on(case, pipe, opt, 0, 1)
            pipe.load_checkpoint(f"{folder}/{kind}", prefix="model.")
            whole.append(pipe.full_state_dict())
    return whole


def keep_random_numbers(rank: int, world: int, case: Case, folder: str) -> list[float]:
    """What is drawn next, where a checkpoint is saved."""
    pipe, opt = open_run(case)
    with pipe:
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        pd2.save(folder, pipe, opt, extra={"rank": rank}).wait()
        return _draws()


def find_random_numbers(
    rank: int, world: int, case: Case, folder: str
) -> tuple[list[float], list[float], int, tuple[int, int]]:
    """What would have been drawn next, what is after loading, and whose extra this rank got."""
    pipe, opt = open_run(case)
    with pipe:
        torch.manual_seed(300 + rank)
        random.seed(400 + rank)
        before = _draws()
        torch.manual_seed(300 + rank)
        random.seed(400 + rank)
        extra = pd2.load(folder, pipe, opt, extra={"rank": None})
        grid = pipe.session.grid
        return before, _draws(), extra["rank"], (grid.replica, grid.shard)


def _draws() -> list[float]:
    return [float(torch.rand(())), random.random()]


def result_of(pipe: pd2.PipelineModule, losses: list[float], norms: list[float]) -> Result:
    grid = pipe.session.grid
    return Result(
        (grid.replica, grid.local_ranks[0], grid.shard),
        losses,
        norms,
        copy_of(as_local(pipe.state_dict(), pipe.session.grid.mesh_of_shards)),
        pipe.late_forwards,
        stage_of_parameters(pipe),
    )


def whole_of(results: list[Result]) -> dict[str, torch.Tensor]:
    """The shards put together, with the names of the whole model.

    What several processes have alike must have the same bits.
    """
    found: dict[str, dict[int, torch.Tensor]] = {}
    for result in results:
        for name, tensor in result.state.items():
            layer, _, rest = name.partition(".")
            known = NAMES.get(rest, rest)
            number = result.place[2] if known in DIMENSIONS else 0
            of_one = found.setdefault(f"{layer}.{known}", {})
            assert torch.equal(of_one.setdefault(number, tensor), tensor), (name, result.place)
    return {
        name: torch.cat(
            [tensors[i] for i in range(len(tensors))], DIMENSIONS.get(name.split(".")[1], 0)
        )
        for name, tensors in found.items()
    }


class Clipped(torch.optim.Optimizer):
    """Clips before the steps of another optimizer, and keeps the norms."""

    def __init__(self, inner: torch.optim.Optimizer, norms: list[float]) -> None:
        super().__init__([{"params": []}], {})
        self.inner, self.norms, self.param_groups = inner, norms, inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.norms.append(float(nn.utils.clip_grad_norm_(parameters, BOUND)))
        self.inner.step()


class Leg(NamedTuple):
    """A run, or a part of one that is saved and goes on elsewhere."""

    case: Case
    results: list[Result]
    first: int
    end: int

    @property
    def late(self) -> dict[str, int]:
        """Of each parameter, by the whole model's names."""
        found = {}
        for result in self.results:
            for name, stage in result.stage_of.items():
                layer, _, rest = name.partition(".")
                found[f"{layer}.{NAMES.get(rest, rest)}"] = result.late[stage]
        return found


class Definition:
    """The training by its definition, on the unsplit model."""

    def __init__(self, case: Case) -> None:
        self.model, self.norms = reference_of(case), []
        optimizer = optimizer_of(case, self.model.parameters())
        delay = int("2bw" in case.schedule)
        self.feedback: Corrected | None = None
        if case.feedback:
            optimizer = self.feedback = Corrected(optimizer, "feedback", 1.0, 0)
        self.oracle: Any
        if case.precision is None:
            optimizer = Clipped(optimizer, self.norms) if case.clips else optimizer
            self.oracle = Oracle(self.model, optimizer, M, nn.functional.mse_loss, delay)
            return
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
        low = lowered(self.model, dtype)
        if self.feedback is not None:
            self.feedback.masters = masters_of(self.model, low)
        self.oracle = MixedOracle(
            self.model,
            low,
            optimizer,
            M,
            nn.functional.mse_loss,
            delay,
            dtype=dtype,
            scale=case.scale,
            growth_interval=3,
            clip=self._clip if case.clips else lambda parameters: None,
            left_out=lambda: self.norms.append(float("inf")),
        )

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        self.norms.append(float(clip_norm(parameters, BOUND)))

    def train(self, leg: Leg) -> list[list[float]]:
        """Losses by batch and replica."""
        if leg.case.schedule == "2bw_fresh":
            late = leg.late
            named = list(self.model.named_parameters())
            self.oracle.late = [late[name] for name, _ in named]
            if self.feedback is not None:
                self.feedback.late_shares = {p: late[name] / M for name, p in named}
        by_replica = [
            batches_of(leg.case, replica)[leg.first : leg.end]
            for replica in range(leg.case.shape.dp)
        ]
        return [self.oracle.train_replicas(each) for each in zip(*by_replica, strict=True)]


def distances(*legs: Leg) -> dict[str, float]:
    """How far each tensor of the end is from the definition, by its norm; so losses and norms."""
    definition, found = Definition(legs[0].case), {}
    for leg in legs:
        losses = definition.train(leg)
        for result in leg.results:
            mine = [of_batch[result.place[0]] for of_batch in losses]
            found[f"losses of {result.place}"] = _distance(result.losses, mine)
            if leg.case.clips and result.norms:
                norms = definition.norms[leg.first : leg.end]
                found[f"norms of {result.place}"] = _distance(result.norms, norms)
    assert not legs[0].case.clips or max(definition.norms) > BOUND
    ours, want = whole_of(legs[-1].results), definition.model.state_dict()
    assert ours.keys() == want.keys()
    return found | {
        name: float((ours[name] - theirs).norm() / theirs.norm()) for name, theirs in want.items()
    }


def _distance(ours: list[float], theirs: list[float]) -> float:
    """Infinite ones, of batches that are left out, must be at the same places."""
    a, b = (torch.tensor(n, dtype=torch.float64).nan_to_num(7.0, 7.0) for n in (ours, theirs))
    return float((a - b).norm() / b.norm())
