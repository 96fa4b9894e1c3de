"""The same stages trained by pipedream2bw, by torch.distributed.pipelining, and unsplit."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from measuring.stages import Workload, mse_loss
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import pipedream2bw as pd2

LEARNING_RATE = 3e-4
FILLING_STEPS = 3
"""Steps after which a pipeline that was empty counts as being in the steady state."""
MIN_STEPS = FILLING_STEPS + 3
TOLERANCE = 1e-5


@dataclasses.dataclass
class Block:
    """Steps trained in one go, from an empty pipeline to an empty pipeline, as one rank saw them.

    ``losses`` and the times at which they had been read are empty on ranks without the last stage.
    ``cpu_seconds`` are those of all threads of the rank's process.
    """

    started: float
    ended: float
    losses: list[float]
    read_at: list[float]
    batches_late: int = 1
    cpu_seconds: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        """With filling and draining."""
        return (self.ended - self.started) / len(self.losses)

    @property
    def steady_seconds_per_step(self) -> float:
        """Between two readings of a loss, after the filling and before the draining."""
        first = FILLING_STEPS - 2 + self.batches_late
        last = len(self.read_at) - 1 - self.batches_late
        return (self.read_at[last] - self.read_at[first]) / (last - first)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


class Trainer(Protocol):
    """Trains on one fixed batch."""

    def train(self, steps: int) -> Block: ...


class Pipeline:
    """pipedream2bw: stage threads if there is no process group, else one stage per rank.

    Every loss is read ``batches_late`` batches late, in the process of the last stage.
    """

    def __init__(
        self,
        workload: Workload,
        num_stages: int,
        num_microbatches: int,
        schedule: str | pd2.Schedule,
        stages_per_rank: int = 1,
        batches_late: int = 1,
        recompute: bool = False,
        make_optimizer: MakeOptimizer = adamw,
        max_grad_norm: float | None = None,
        width: int = 1,
        replica_sums: str = "ordered",
        shard_state: bool = False,
        update_slots: int | str | None = None,
        extensions: Sequence[pd2.Extension] = (),
        num_shards: int = 1,
        error_feedback: bool = False,
    ) -> None:
        self.batches_late = batches_late
        x, target = workload.batch(num_microbatches)
        stages = [workload.stage(index) for index in range(num_stages)]
        mesh = None
        if num_shards > 1:  # of sleeping stages, which exchange nothing but what a norm needs
            stages = [pd2.use_local_shards(stage, {"scale": ("tp", 0)}) for stage in stages]
            mesh = {"dp": width, "pp": num_stages // stages_per_rank, "tp": num_shards}
        self.pipe = pd2.PipelineModule(
            stages,
            mse_loss,
            num_microbatches=num_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            update_slots=update_slots,
            recompute=recompute,
            width=width,
            replica_sums=replica_sums,
            mesh=mesh,
            example_args=(x[: workload.rows],),
        )
        self.optimizer = pd2.PipelineOptimizer(
            make_optimizer(self.pipe.parameters()),
            max_grad_norm=max_grad_norm,
            shard_state=shard_state,
            staleness=pd2.ErrorFeedback() if error_feedback else (),
            extensions=extensions,
        )
        self.args = (x,) if self.pipe.is_first_stage else ()
        self.target = target if self.pipe.is_last_stage else None

    def train(self, steps: int) -> Block:
        block = Block(time.perf_counter(), 0.0, [], [], self.batches_late)
        cpu_seconds = time.process_time()
        unread: collections.deque[pd2.Loss] = collections.deque()
        for _ in range(steps):
            loss = self.pipe.train_step(*self.args, target=self.target)
            self.optimizer.step()
            self.optimizer.zero_grad()
            unread.append(loss)
            if len(unread) > self.batches_late:
                self._read(unread.popleft(), block)
        while unread:
            self._read(unread.popleft(), block)
        self.pipe.flush()
        block.ended = time.perf_counter()
        block.cpu_seconds = time.process_time() - cpu_seconds
        return block

    def _read(self, loss: pd2.Loss, block: Block) -> None:
        if self.pipe.is_last_stage:
            block.losses.append(float(loss))
            block.read_at.append(time.perf_counter())

    def close(self) -> None:
        self.pipe.close()


class TorchPipeline:
    """One of torch.distributed.pipelining's schedules.

    Set up as fast as it goes: no outputs kept, the microbatch's loss scaled instead of all
    gradients afterwards, AdamW in one fused pass. Replicas average their gradients in one message.
    To clip, all ranks' squares are added up.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        num_stages: int,
        num_microbatches: int,
        schedule: str = "1F1B",
        stages_per_rank: int = 1,
        make_optimizer: MakeOptimizer = adamw,
        max_grad_norm: float | None = None,
        width: int = 1,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.width = width
        num_ranks = num_stages // stages_per_rank
        pipelines, self.replicas = (
            dist.new_subgroups_by_enumeration([list(part) for part in parts])[0]
            for parts in (
                [range(r * num_ranks, (r + 1) * num_ranks) for r in range(width)],
                [range(i, width * num_ranks, num_ranks) for i in range(num_ranks)],
            )
        )
        rank %= num_ranks

        def scaled_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return mse_loss(output, target) / num_microbatches

        indices = list(range(rank, num_stages, num_ranks))
        if schedule.startswith("ZBV"):
            indices = [rank, num_stages - 1 - rank]
        modules = nn.ModuleList([workload.stage(index) for index in indices])
        self.stages = [
            PipelineStage(module, index, num_stages, torch.device("cpu"), group=pipelines)
            for index, module in zip(indices, modules, strict=True)
        ]
        kind = get_schedule_class(schedule)
        self.schedule = kind(
            self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages,
            num_microbatches,
            scaled_loss,
            scale_grads=False,
        )
        self.parameters = list(modules.parameters())
        self.optimizer = make_optimizer(self.parameters)
        x, target = workload.batch(num_microbatches)
        self.args = (x,) if rank == 0 else ()
        self.target = target if num_stages - 1 in indices else None

    def train(self, steps: int) -> Block:
        block = Block(time.perf_counter(), 0.0, [], [])
        for _ in range(steps):
            losses: list[torch.Tensor] = []
            self.schedule.step(*self.args, target=self.target, losses=losses, return_outputs=False)
            if self.width > 1:
                self._average()
            if self.max_grad_norm is not None:
                self._clip(self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.target is not None:
                block.losses.append(sum(loss.item() for loss in losses))
                block.read_at.append(time.perf_counter())
        block.ended = time.perf_counter()
        return block

    def _average(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=self.replicas)
        flat /= self.width
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        squares = nn.utils.get_total_norm(gradients).square() / self.width
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, squares.sqrt())


class Unsplit:
    """The whole model in one thread, gradients of the microbatches accumulated."""

    def __init__(self, workload: Workload, num_stages: int, num_microbatches: int) -> None:
        self.model = nn.Sequential(*(workload.stage(index) for index in range(num_stages)))
        self.optimizer = adamw(self.model.parameters())
        x, target = workload.batch(num_microbatches)
        pairs = zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
        self.microbatches = list(pairs)

    def train(self, steps: int) -> Block:
        block = Block(time.perf_counter(), 0.0, [], [])
        for _ in range(steps):
            losses = []
            for x, target in self.microbatches:
                loss = mse_loss(self.model(x), target) / len(self.microbatches)
                loss.backward()
                losses.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
            block.losses.append(sum(loss.item() for loss in losses))
            block.read_at.append(time.perf_counter())
        block.ended = time.perf_counter()
        return block


def check_losses(what: str, schedule: str, actual: Sequence[float], stock: Sequence[float]) -> None:
    """Compares a pipeline's first losses on one fixed batch with those of synchronous training.

    The first batches of 2bw, under any of its names, use the weights W(0), W(0), W(1); a flushing
    schedule's W(0), W(1), W(2). 2bw_fresh's have two versions in a batch, but for the first.

    Raises:
        SystemExit: they differ by more than ``TOLERANCE`` relative to the loss.
    """
    expected = [stock[0], stock[0], stock[1]] if "2bw" in schedule else stock[:3]
    if schedule == "2bw_fresh":
        expected = stock[:1]
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=False)):
        if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
            raise SystemExit(
                f"{what}: the loss of step {step} is {ours} under {schedule}, {theirs} expected"
            )


def check_training(what: str, first: float, last: float) -> None:
    """Raises SystemExit if the loss is not finite or has not become smaller."""
    if not (math.isfinite(last) and last < first):
        raise SystemExit(f"{what} does not train: the loss was {first} and is {last}")


def steps_lasting(seconds: float, block: Block) -> int:
    """The number of steps to measure for about ``seconds``."""
    return max(MIN_STEPS, FILLING_STEPS + math.ceil(seconds / block.steady_seconds_per_step))


def alternate(
    trainers: dict[str, Trainer],
    steps: dict[str, int],
    rounds: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, list[Block]]:
    """One block of steps of each trainer in turn, ``rounds`` times."""
    blocks: dict[str, list[Block]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            synchronize()
            blocks[name].append(trainer.train(steps[name]))
    return blocks


def alternate_on_ranks(
    trainers: dict[str, Trainer], steps: dict[str, int], rounds: int
) -> dict[str, list[Block]]:
    """The same on all ranks together; closes the pipelines. Every rank calls it."""
    blocks = alternate(trainers, steps, rounds, dist.barrier)
    for trainer in trainers.values():
        if isinstance(trainer, Pipeline):
            trainer.close()
    return blocks


def steady_times(blocks: dict[str, list[Block]]) -> dict[str, list[float]]:
    """Steady seconds per step by name and round, where there are losses."""
    return {
        name: [block.steady_seconds_per_step for block in of_name]
        for name, of_name in blocks.items()
        if of_name[-1].losses
    }
