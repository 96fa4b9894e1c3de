"""Trainings on the checked device, and what they ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipedream2bw as pd2
from tests.device import checked
from tests.device.checked import Asked, AskedKind, Ordering
from tests.gpu_check.blocks import blocks

M, WIDTH, LENGTH = 8, 64, 8
WARM_UP, STEADY = 6, 8
"""Batches: with graphs the first ones record."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training of transformer blocks.

    Attributes:
        processes: 1: the stages are threads of one process, on two devices.
        width: replicas, in processes.
        dropout: its probability behind each block.
    """

    name: str
    num_stages: int = 2
    processes: int = 1
    width: int = 1
    dropout: float = 0.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    of_optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)


SETTINGS = (
    Setting("2 threads"),
    Setting("2 threads, graphs", options={"graphs": "auto"}),
    Setting("2 threads, graphs, dropout", dropout=0.1, options={"graphs": "auto"}),
    Setting("2 threads, clipping", of_optimizer={"max_grad_norm": 1.0}),
    Setting("2 processes, rings", processes=2),
    Setting("4 replicas, ordered sums", num_stages=1, processes=4, width=4),
)


def model_of(setting: Setting, device: str) -> nn.Module:
    layers = list(blocks(2 * setting.num_stages, WIDTH, torch.device("cpu")))
    if setting.dropout:
        layers = [nn.Sequential(each, nn.Dropout(setting.dropout)) for each in layers]
    return nn.Sequential(*layers).to(device)


def steps(pipe: Any, opt: Any, x: torch.Tensor) -> Callable[[int], None]:
    def train(batches: int) -> None:
        for _ in range(batches):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()

    return train


def count(setting: Setting, rank: int) -> dict[str, float]:
    """By what is asked, how often it is for a microbatch of a stage."""
    device = f"checked:{rank}"
    options = dict(setting.options)
    if setting.processes == 1:
        options["devices"] = [f"checked:{stage}" for stage in range(setting.num_stages)]
    x = torch.randn(M * 2, LENGTH, WIDTH, device=device)
    with pd2.PipelineModule(
        model_of(setting, device),
        nn.functional.mse_loss,
        num_stages=setting.num_stages,
        num_microbatches=M,
        width=setting.width,
        example_args=(x,),
        timeout=60.0,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=1e-3), **setting.of_optimizer
        )
        train = steps(pipe, opt, x)
        train(WARM_UP)
        orderings = {"events waited for": Ordering.STREAM_WAIT}
        orderings["record_stream"] = Ordering.RECORD_STREAM
        before = {name: checked.count(kind) for name, kind in orderings.items()}
        launches = checked.num_launches()
        with checked.log() as asked:
            train(STEADY)
        found = {"launches": checked.num_launches() - launches, **dict(by_kind(asked))}
        for name, kind in orderings.items():
            found[name] = checked.count(kind) - before[name]
    stages_here = setting.num_stages if setting.processes == 1 else 1
    of_one = {name: number / (STEADY * M * stages_here) for name, number in found.items()}
    of_model = launches_of_model(setting, device) / setting.num_stages
    return {"launches of the model's own, without graphs": of_model, **of_one}


def launches_of_model(setting: Setting, device: str) -> float:
    """Of a microbatch of the unsplit model, whose gradients are added to others."""
    model, x = model_of(setting, device), torch.randn(2, LENGTH, WIDTH, device=device)
    for _ in range(2):
        before = checked.num_launches()
        nn.functional.mse_loss(model(x), x).backward()
    return checked.num_launches() - before


def by_kind(asked: list[Asked]) -> Iterator[tuple[str, int]]:
    def number(*kinds: AskedKind, of: str = "", but: str = "none") -> int:
        return sum(
            each.kind in kinds and each.thread.startswith(of) and not each.thread.startswith(but)
            for each in asked
        )

    yield "transfers", number(AskedKind.TRANSFER)
    yield "waits of stages' threads, not to run ahead", number(AskedKind.HOST_WAIT, of="pd2 stage")
    yield "waits of all other hosts", number(AskedKind.HOST_WAIT, but="pd2 stage")


def of_rank(rank: int, world: int, number: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("checked")
    checked.set_drains(at_first_use=False, probability=0.0, seed=rank)
    counts = count(SETTINGS[number], rank)
    dist.destroy_process_group()
    return counts
