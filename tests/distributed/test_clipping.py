"""Clipping under processes: every rank finds the whole model's norm, whenever messages come."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of, make_pipeline
from tests.samples.models import TASKS, whole

NUM_BATCHES = 6
BOUND = 0.8


class ClippedSGD(torch.optim.SGD):
    """The definition: torch's own function on the unsplit model."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3, momentum=0.5)
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.norms.append(float(nn.utils.clip_grad_norm_(parameters, BOUND)))
        return super().step()


def check(width: int, schedule: str, m: int, *, stages_per_rank: int = 1) -> None:
    """On every rank; each compares what it holds."""
    task = TASKS["skips"]
    num_ranks = torch.distributed.get_world_size() // width
    d = num_ranks * stages_per_rank
    own = torch.distributed.get_rank() // num_ranks
    by_replica = [task.batches([2 * m] * NUM_BATCHES, seed=10 + r) for r in range(width)]
    model = whole(task.model())
    stock = ClippedSGD(model.parameters())
    pipelines = 2 if "chimera" in schedule else 1
    delay = int("2bw" in schedule)
    oracle = Oracle(model, stock, m, task.loss_fn, delay, num_pipelines=pipelines)
    want = [oracle.train_replicas(batches)[own] for batches in zip(*by_replica, strict=True)]
    assert max(stock.norms) > BOUND
    with make_pipeline(
        task,
        d,
        m,
        by_replica[0][0],
        width=width,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
    ) as pipe:
        plain = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.5)
        opt = pd2.PipelineOptimizer(plain, max_grad_norm=BOUND)
        losses, norms = [], []
        for batch in by_replica[own]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            norms.append(opt.grad_norm)
        state = copy_of(pipe.state_dict())
        got = torch.tensor(
            [[float(loss), float(norm)] for loss, norm in zip(losses, norms, strict=True)]
        )
    assert torch.equal(got, torch.tensor([*zip(want, stock.norms, strict=True)]))
    for name, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def clip(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    num_ranks = world // width
    for delays in (contextlib.nullcontext(), delays_everywhere(0.02)):
        with delays:
            check(width, "2bw", num_ranks)
            check(width, "1f1b", 3)
    if num_ranks > 1:
        check(width, "2bw_eager", 2 * num_ranks)
        if num_ranks == 2:
            check(width, "interleaved_2bw", 4, stages_per_rank=2)
        check(width, "chimera", num_ranks)
    if width == 1 and world == 2:
        disagree(rank, world)


@pytest.mark.parametrize(("world", "width"), [(4, 2), *exhaustive((2, 1), (2, 2), (4, 1))])
def test_every_rank_clips_as_the_unsplit_model_does(world: int, width: int) -> None:
    run_ranks(clip, world, args=[width], timeout=150)


def disagree(rank: int, world: int) -> None:
    """Every rank learns of a bad bound."""
    task = TASKS["skips"]
    batch = task.batches([4])[0]
    with make_pipeline(task, world, 2, batch) as pipe:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"max_grad_norm": 1.0 + rank}, r"max_grad_norm must be the same.*rank 0: 1\.0"),
            ({"max_grad_norm": -1.0 if rank == 1 else 1.0}, r"max_grad_norm: -1\.0"),
            ({"max_grad_norm": 1.0, "norm_type": 2.0 + rank}, "norm_type must be the same"),
            ({"loss_scale": pd2.LossScale(1.0 + rank)}, "loss_scale must be the same"),
        ]
        for options, message in cases:
            with pytest.raises(ValueError, match=message):
                pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), **options)
