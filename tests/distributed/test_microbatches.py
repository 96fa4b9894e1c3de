"""Batches of few rows and ready-made microbatches, in processes."""

from __future__ import annotations

import pytest
import torch

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.microbatches import DROPOUT, M, check
from tests.runs.trajectory import make_pipeline, sgd


def train(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    for schedule in ("2bw", "1f1b", "chimera", "2bw_split"):
        check(world, rank, schedule, width=1)
    for schedule in ("2bw", "1f1b"):
        check(world, rank, schedule, width=2, accumulate=2)


def test_each_rank_knows_how_many_there_are() -> None:
    run_ranks(train, 4, timeout=90)


def go_wrong(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    parts = DROPOUT.batches([2, 1])
    ready = [pd2.Microbatch(*each.args, target=each.target) for each in parts]
    with make_pipeline(DROPOUT, world, M, parts[0]) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        is_last = rank == world - 1
        with pytest.raises(ValueError, match="a batch, on rank 1: microbatches="):
            if is_last:
                pipe.train_step(microbatches=ready)
            else:
                pipe.train_step(*parts[0].args)
        with pytest.raises(ValueError, match="microbatches: 2 with arguments, 1 with targets"):
            pipe.train_step(microbatches=ready[:1] if is_last else ready)
        with pytest.raises(ValueError, match="microbatch 0: rows of the arguments: 2, rows of the"):
            pipe.train_step(microbatches=ready[::-1] if is_last else ready)
        with pytest.raises(TypeError, match=r"microbatches\[0\]: 3 given, it must be a Microbatch"):
            pipe.train_step(microbatches=[3] if is_last else ready)
        loss = pipe.train_step(microbatches=ready)
        opt.step()
        assert float(loss) > 0


def test_all_ranks_refuse_what_does_not_go_together() -> None:
    run_ranks(go_wrong, 2, timeout=60)
