"""Training on the checked device, compared with the oracle's on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.references.oracle import Batch
from tests.runs.trajectory import (
    MakeOptimizer,
    Trajectory,
    assert_same,
    by_pipeline,
    expected,
    sgd,
    version_options,
)
from tests.samples.models import TASKS, Task


def moved(model: Any, device: str) -> Any:
    """The model on the device, tied parameters still tied: ``Module.to`` unties them there.

    Torch lets a tensor change its memory to one of this device only if it is of this device.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model if isinstance(model, list) else [model]:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if parameter not in made:
                        made[parameter] = nn.Parameter(
                            parameter.detach().to(device), parameter.requires_grad
                        )
                    part._parameters[name] = made[parameter]
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def on(task: Task, device: str) -> Task:
    """The task with its model on the device."""
    return dataclasses.replace(task, build=lambda: moved(task.build(), device))


def batch_on(batch: Batch, device: str) -> Batch:
    """The batch on the device."""
    args, kwargs, target = tree_map_only(
        torch.Tensor, lambda leaf: leaf.to(device), (batch.args, dict(batch.kwargs), batch.target)
    )
    return Batch(args, target, kwargs)


_FOR_ORACLE = ("loss_reduction", "replicated", "accumulate", "warmup_batches")


def places(num_stages: int, num_devices: int) -> list[str]:
    """A device for each stage, in turn."""
    return [f"checked:{stage % num_devices}" for stage in range(num_stages)]


def check_on_device(
    task: Task,
    num_stages: int,
    num_microbatches: int,
    rows: Sequence[int],
    make_optimizer: MakeOptimizer = sgd,
    *,
    home: str = "checked:0",
    num_devices: int | None = 1,
    schedule: str = "2bw",
    **options: Any,
) -> None:
    """Trains on the device and by the oracle on the CPU: the same bits.

    Args:
        home: where the model is when the pipeline takes it over.
        num_devices: on which the stages are in turn; None: each process's is at home.
    """
    # Torch has fused attention for devices that it knows; for others it takes simpler steps.
    exact = task.exact and task is not TASKS["gpt"]
    batches = task.batches(rows)
    shared = {key: options[key] for key in _FOR_ORACLE if key in options}
    example = batch_on(batches[0], home)
    shared |= version_options(on(task, home), num_stages, num_microbatches, example, schedule)
    want = expected(task, rows, num_microbatches, make_optimizer, schedule=schedule, **shared)
    got = by_pipeline(
        on(task, home),
        batches,
        num_stages,
        num_microbatches,
        make_optimizer,
        example=example,
        schedule=schedule,
        devices=None if num_devices is None else places(num_stages, num_devices),
        **options,
    )
    held = {name: want.state[name] for name in got.state}  # of this process, if there are several
    assert_same(got.on_host(), Trajectory(want.losses, held), exact=exact)
