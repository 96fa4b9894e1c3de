"""Ranks of one replica that read different batches are told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.samples.models import TASKS

TASK = TASKS["mlp"]
WORDS = r"targets on ranks .* differ.*DistributedSampler num_replicas=pipe\.width and rank=pipe"


def made(world: int, schedule: str = "2bw", **options: Any) -> pd2.PipelineModule:
    (batch,) = TASK.batches([8])
    return pd2.PipelineModule(
        TASK.model(),
        lambda output, target: TASK.loss_fn(output, target["y"]),
        num_microbatches=4,
        schedule=schedule,
        example_args=batch.args,
        timeout=30,
        **options,
    )


def differ(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    for schedule, width in (("2bw", 2), ("chimera", 2), ("1f1b", 1)):
        with made(world, schedule, num_stages=world // width, width=width) as pipe:
            (batch,) = TASK.batches([8], seed=pipe.replica)  # replicas read their own
            (x,), y = batch.args, batch.target
            other = TASK.batches([8], seed=9)[0].target
            names = [f"{pipe.replica} {row}" for row in range(8)]
            mine = other if rank == 0 else y

            def step(target: Any, pipe: pd2.PipelineModule = pipe, x: Any = x) -> None:
                pipe.train_step(x, target=target)
                pipe.discard_batch()

            bad = {
                "tensor": {"y": mine},
                "one row": {"y": torch.cat([y[:7], mine[7:]])},
                "turned": {"y": mine.t().contiguous().t()},
                "array": {"y": y, "more": mine.numpy()},
                "texts": {"y": y, "names": names[::-1] if rank == 0 else names},
            }
            for target in bad.values():
                with pytest.raises(ValueError, match=WORDS):
                    step(target)
            ready = [pd2.Microbatch(x, target={"y": mine})]
            with pytest.raises(ValueError, match=WORDS):
                pipe.train_step(microbatches=ready * 4)
            with torch.no_grad(), pytest.raises(ValueError, match=WORDS):
                pipe.eval_step(x, target={"y": mine})
            step({"y": y, "names": names})
            if schedule == "chimera":
                continue  # where the first stage's rank needs a target, too
            pipe.train_step(x + rank, target={"y": y})  # augmented by each rank, and so not read
            pipe.discard_batch()
            step({"y": y} if pipe.is_last_stage else None)


def test_different_targets_are_an_error_on_every_rank() -> None:
    run_ranks(differ, 4, timeout=120)


def sample(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    rows = torch.arange(64.0)[:, None].expand(64, 8)
    data = TensorDataset(rows.contiguous(), rows.contiguous())
    with made(world, num_stages=2, width=2) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.0))
        right: Any = DistributedSampler(data, num_replicas=pipe.width, rank=pipe.replica)
        for sampler, is_right in ((DistributedSampler(data), False), (right, True)):
            for x, y in DataLoader(data, batch_size=8, sampler=sampler):
                if not is_right:
                    with pytest.raises(ValueError, match=WORDS):
                        pipe.train_step(x, target={"y": y})
                    continue
                pipe.train_step(x, target={"y": y})
                opt.step()


def test_a_sampler_of_replicas_is_right_and_one_of_ranks_is_not() -> None:
    run_ranks(sample, 4, timeout=60)
