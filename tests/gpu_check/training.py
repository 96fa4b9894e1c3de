"""One training by the pipeline on the device, in threads or processes, and by the definition."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import pipedream2bw as pd2
from pipedream2bw import _C
from tests.device.on_device import moved
from tests.references.mixed_oracle import MixedOracle, lowered
from tests.references.oracle import Batch
from tests.runs.trajectory import (
    Trajectory,
    by_oracle,
    copy_of,
    go_on,
    make_pipeline,
    version_options,
)
from tests.samples.models import Task, whole

from .device import Device
from .jitter import Jitter

RATE, BOUND = 0.1, 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """What a pipeline is given. ``loss_scale`` needs "fp16"."""

    num_stages: int = 2
    num_microbatches: int = 4
    schedule: str = "2bw"
    stages_per_rank: int = 1
    clips: bool = False
    precision: str | None = None
    accumulate: int = 1
    steps_itself: bool = False
    """The optimizer is one of which the engine has no pass."""

    def __str__(self) -> str:
        given = (
            (f"v={self.stages_per_rank}", self.stages_per_rank > 1),
            ("clipped", self.clips),
            (self.precision, self.precision is not None),
            (f"accumulate={self.accumulate}", self.accumulate > 1),
            ("own step", self.steps_itself),
        )
        more = "".join(f" {text}" for text, is_given in given if is_given)
        return f"{self.schedule} d={self.num_stages} m={self.num_microbatches}{more}"


def task_on(task: Task, device: Device) -> Task:
    """The same whose model and batches are on the device."""

    def draw(rows: int) -> Batch:
        return Batch(*pytree.tree_map_only(torch.Tensor, there, tuple(task.draw(rows))))

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device.torch)

    return dataclasses.replace(
        task, build=lambda: moved(whole(task.build()), str(device.torch)), draw=draw
    )


class OwnSGD(torch.optim.SGD):
    """The engine has no pass for what is not SGD itself."""


class ClippedSGD(torch.optim.SGD):
    """Clips as ``max_grad_norm`` does, then steps."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], BOUND)
        return super().step()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def clipped_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ClippedSGD(parameters, lr=RATE)


def has_pass(device: Device) -> bool:
    """Tells whether the engine steps optimizers of this device in a pass of its own."""
    flat = torch.zeros(16, device=device.torch)
    try:
        _C.FusedOptimizer("sgd", [_C.ParameterSlice(offset=0, numel=16, group=0)], flat)
    except ValueError:
        return False
    return True


def sgd_of(
    device: Device, parameters: Iterable[nn.Parameter], *, steps_itself: bool = False
) -> torch.optim.Optimizer:
    """For a pipeline on the device. The numbers are the same wherever the step is computed."""
    kind = OwnSGD if steps_itself or not has_pass(device) else torch.optim.SGD
    return kind(parameters, lr=RATE)


def adamw_of(
    device: Device, parameters: Iterable[nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Where there is no pass for AdamW, SGD: for figures that mean nothing there."""
    if not has_pass(device):
        return OwnSGD(parameters, lr=RATE)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused or None)


def by_threads(
    device: Device,
    task: Task,
    batches: list[Batch],
    case: Case,
    *,
    jitter: Jitter | None = None,
    at_every_place: Callable[[], object] = lambda: None,
) -> Trajectory:
    """``at_every_place`` is called before and after every call of the pipeline's."""
    model = task.model()
    if jitter is not None:
        jitter.into(model)
    options: dict[str, Any] = {"precision": case.precision, "accumulate": case.accumulate}
    with make_pipeline(
        task,
        case.num_stages,
        case.num_microbatches,
        batches[0],
        model=model,
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(
            sgd_of(device, pipe.parameters(), steps_itself=case.steps_itself),
            max_grad_norm=BOUND if case.clips else None,
            loss_scale=pd2.LossScale(init_scale=256.0) if case.precision == "fp16" else None,
        )
        losses = []
        for number, batch in enumerate(batches):
            at_every_place()
            losses.append(pipe.train_step(*batch.args, target=batch.target, **batch.kwargs))
            at_every_place()
            if (number + 1) % case.accumulate == 0:
                opt.step()
        at_every_place()
        state = copy_of(pipe.state_dict())
        at_every_place()
        return Trajectory([loss.item() for loss in losses], state)


def by_processes(
    device: Device,
    task: Task,
    batches: list[Batch],
    *,
    num_stages: int,
    num_microbatches: int,
    timeout: float,
    look: Callable[[pd2.PipelineModule], object] = lambda pipe: None,
    **options: Any,
) -> Trajectory:
    """Every process of the default group calls it. ``look`` is called at the end."""
    with pd2.PipelineModule(
        task.model(),
        task.loss_fn,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        example_args=batches[0].args,
        split=task.split(num_stages),
        timeout=timeout,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
        trained = go_on(pipe, opt, batches)
        look(pipe)
        return trained


def by_definition(task: Task, batches: list[Batch], case: Case) -> Trajectory:
    """On the unsplit model, on the device, by stock torch."""
    make = clipped_sgd if case.clips else sgd
    if case.precision is None:
        return by_oracle(
            task,
            batches,
            case.num_microbatches,
            make,
            schedule=case.schedule,
            accumulate=case.accumulate,
            **version_options(
                task, case.num_stages, case.num_microbatches, batches[0], case.schedule
            ),
        )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    model = task.model()
    oracle = MixedOracle(
        model,
        lowered(model, dtype),
        make(model.parameters()),
        case.num_microbatches,
        task.loss_fn,
        int("2bw" in case.schedule),
        dtype=dtype,
        scale=256.0 if case.precision == "fp16" else None,
    )
    losses = [oracle.train_step(batch) for batch in batches]
    return Trajectory(losses, copy_of(model.state_dict()))


def distance(got: Trajectory, want: Trajectory) -> float:
    """The farthest tensor's (or the losses') distance, relative to its norm; 0: equal bits."""
    pairs = [(torch.tensor(got.losses), torch.tensor(want.losses))]
    pairs += [(got.state[name], theirs) for name, theirs in want.state.items()]
    farthest = 0.0
    for ours, theirs in pairs:
        if torch.equal(ours, theirs):
            continue
        apart = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        farthest = max(farthest, float(apart.nan_to_num(nan=torch.inf)))
    return farthest


@contextlib.contextmanager
def repeatable() -> Any:
    """Operators that give the same bits again, and no TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
