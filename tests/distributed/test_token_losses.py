"""Replicas divide their losses by the number of tokens that all of them count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.runs.launch import run_ranks
from tests.runs.token_losses import TASK, by_definition, by_pipeline, count, padded
from tests.runs.trajectory import Trajectory, assert_same, make_pipeline, sgd


def train(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    width, replica = 2, rank // (world // 2)
    for numbers in (4, (4, 6)):
        of_replicas = [numbers] * width if isinstance(numbers, int) else list(numbers)
        by_replica = [padded([2 * m] * 6, seed=5 + number) for number, m in enumerate(of_replicas)]
        for accumulate, schedule in ((1, "2bw"), (3, "2bw"), (3, "1f1b")):
            want = by_definition(by_replica, numbers, accumulate, delay=int(schedule == "2bw"))
            options: dict[str, Any] = {"schedule": schedule, "width": width}
            got = by_pipeline(by_replica[replica], world // 2, numbers, accumulate, **options)
            held = {name: want.state[name] for name in got.state}
            assert_same(got, Trajectory(want.losses, held))


@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_replicas_and_train_steps_are_one_sum(world: int) -> None:
    run_ranks(train, world, timeout=90)


def go_wrong(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    batch = padded([8], seed=rank // 2)[0]
    options: dict[str, Any] = {"loss_reduction": "sum", "normalizer": True, "width": 2}
    with make_pipeline(TASK, 2, 4, batch, **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        number = count(batch.target)
        with pytest.raises(ValueError, match="normalizer: None given"):
            pipe.train_step(
                *batch.args, target=batch.target, normalizer=None if rank == 3 else number
            )
        loss = pipe.train_step(*batch.args, target=batch.target, normalizer=number)
        opt.step()
        assert float(loss) > 0


def test_all_ranks_refuse_what_one_was_not_given() -> None:
    run_ranks(go_wrong, 4, timeout=60)
