"""What a batch takes beside its layers: the optimizer's pass, and the engine's own work."""

from __future__ import annotations

import torch
from torch import nn

from ... import _C
from ...capture.device_figures import DeviceFigures
from ...model.precision import Precision
from ...options import Options
from ...ranks.agreement import ControlPlane
from ...ranks.deadline import Deadline
from ...ranks.grid import RankGrid
from ...runtime.closing import close
from ...runtime.local_stages import LocalStages
from ...runtime.microbatch import Microbatch
from ...runtime.runner import StageOptions
from ...runtime.session import Session
from ...runtime.step_data import StepArguments
from ...schedules.load import make_schedule
from ...stages.modes import Modes
from .timing import median_seconds

# Larger than caches are, with Adam's state 80 MB.
_ELEMENTS = 4 * 2**20
_TIMEOUT = 60.0  # seconds
_OPTIMIZERS = {
    "sgd": ("sgd", _C.GroupOptions()),
    "momentum": ("sgd", _C.GroupOptions(momentum=0.9)),
    "adamw": ("adam", _C.GroupOptions(weight_decay=0.01, decoupled_weight_decay=True)),
}

# Bytes that a step reads and writes for each byte of float32 weights.
TRAFFIC = {"sgd": 3, "momentum": 5, "adamw": 7}


def seconds_per_update_byte(device: torch.device) -> dict[str, float]:
    """How long the engine's fused passes take for each byte of float32 weights.

    They are called as a stage calls them, on a buffer of 16 MiB. Those "on host" have the longest
    of the pass there, of the gradients' way down and of the weights' way up, which overlap.
    """
    here = _passes(device)
    host = torch.device("cpu")
    if device == host:
        return here | {f"{name} on host": seconds for name, seconds in here.items()}
    there, memory = torch.ones(_ELEMENTS, device=device), torch.ones(_ELEMENTS).pin_memory()
    down = median_seconds(lambda: memory.copy_(there), device, times=5, warmup=1)
    up = median_seconds(lambda: there.copy_(memory), device, times=5, warmup=1)
    slower = max(down, up) / memory.nbytes
    on_host = {name: max(seconds, slower) for name, seconds in _passes(host).items()}
    return here | {f"{name} on host": seconds for name, seconds in on_host.items()}


def dry_seconds_per_update_byte(figures: DeviceFigures) -> dict[str, float]:
    """How long the same passes take by a device's figures.

    Those "on host" are missing if the figures say nothing about the host.
    """
    part = figures.memory_efficiency
    here = {name: size / (figures.bytes_per_second * part) for name, size in TRAFFIC.items()}
    if figures.type == "cpu":
        return here | {f"{name} on host": seconds for name, seconds in here.items()}
    host, copies = figures.host_bytes_per_second, figures.copy_bytes_per_second
    if host is None or copies is None:
        return here
    slower = 1 / (copies * part)
    return here | {
        f"{name} on host": max(size / (host * part), slower) for name, size in TRAFFIC.items()
    }


def _passes(device: torch.device) -> dict[str, float]:
    weights, gradient, written = (torch.ones(_ELEMENTS, device=device) for _ in range(3))

    def seconds_of(kind: str, options: _C.GroupOptions) -> float:
        whole = _C.ParameterSlice(offset=0, numel=_ELEMENTS, group=0)
        fused = _C.FusedOptimizer(kind, [whole], weights)

        def step() -> None:
            fused.step(
                w=weights,
                gradient=gradient,
                w_out=written,
                groups=[options],
                has_gradient=[True],
            )

        return median_seconds(step, device, times=5, warmup=1)

    return {name: seconds_of(*made) / weights.nbytes for name, made in _OPTIMIZERS.items()}


def seconds_per_action(device: torch.device) -> float:
    """What the engine adds to every forward and every backward of a microbatch.

    A pipeline of one stage with hardly any work is timed. This is the time by which its train_step
    grows with the number of microbatches, less that work's time.
    """
    few, many = (_train_step_seconds(count, device) for count in (8, 72))
    layer, row = nn.Linear(1, 1).to(device), torch.zeros(1, 1, device=device)
    work = median_seconds(
        lambda: torch.autograd.backward(nn.functional.mse_loss(layer(row), row)),
        device,
        times=40,
        warmup=10,
    )
    return max(0.0, ((many - few) / 64 - work) / 2)


def _train_step_seconds(num_microbatches: int, device: torch.device) -> float:
    rows = torch.zeros(num_microbatches, 1, device=device)
    session = _session(num_microbatches, rows)
    for stage in session.stages:
        stage.weights.engine.set_optimizers({"sgd": [0, 0]})

    def train_step() -> None:
        session.train_step(StepArguments(Microbatch(rows, target=rows)))
        with session.update() as run:
            for stage in session.stages:
                stage.executor.submit_update(
                    stage=stage.index, run=run, groups=[_C.GroupOptions(lr=0.0)], step=None
                )
        session.drain()

    seconds = median_seconds(train_step, device, times=8, warmup=2)
    close(session)
    return seconds


def _session(num_microbatches: int, rows: torch.Tensor) -> Session:
    """A pipeline of one small layer in this process alone."""
    layer, device = nn.Linear(1, 1).to(rows.device), rows.device
    precision = Precision(layer, Options(), device.type)
    modes = Modes(
        root=layer,
        num_stages=1,
        example=((rows,), {}),
        split="auto",
        replicated=(),
        recomputed_blocks=(),
        precision=precision,
    )
    schedule = make_schedule("1f1b", 1, num_microbatches)
    deadline = Deadline(_TIMEOUT, _C.Fault())
    control = ControlPlane(1, deadline, "engine timing")
    stages = LocalStages(
        root=layer,
        mode=modes.capture(),
        schedule=schedule,
        grid=RankGrid(schedule.placement, 1, deadline),
        control=control,
        options=StageOptions(
            pipeline=Options(),
            loss_fn=nn.functional.mse_loss,
            precision=precision,
            devices=[device],
            recompute=[False],
        ),
    )
    return Session(model=layer, modes=modes, stages=stages)
