"""Several train_steps of one batch in processes: replicas add up their gradients once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import assert_same_state, copy_of, make_pipeline
from tests.samples.models import TASKS, whole

WIDTH, NUM_STAGES, M = 2, 2, 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def check(lengths: Sequence[int], schedule: str, *, averages: bool) -> None:
    """``lengths``: train_steps of each optimizer step. Every rank compares what it holds."""
    task, own = TASKS["skips"], torch.distributed.get_rank() // NUM_STAGES
    rows = [2 * M + k % 2 for k in range(sum(lengths))]
    by_replica = [task.batches(rows, seed=10 + replica) for replica in range(WIDTH)]
    model = whole(task.model())
    pipelines = 2 if schedule == "chimera" else 1
    delay = int("2bw" in schedule)
    oracle = Oracle(model, sgd(model.parameters()), M, task.loss_fn, delay, num_pipelines=pipelines)
    steps = zip(*by_replica, strict=True)
    parts = [[next(steps) for _ in range(length)] for length in lengths]
    losses = [oracle.train_together(part, averages=averages) for part in parts]
    want = [of_step[own] for of_part in losses for of_step in of_part]
    options: dict[str, Any] = {"schedule": schedule, "width": WIDTH}
    if averages:
        options["accumulate"] = lengths[0]
    else:  # sums begin one parameter after the other, in the batch's last microbatch alone
        options["bucket_cap_mb"] = 1e-6
    with make_pipeline(task, NUM_STAGES, M, by_replica[0][0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=100.0)
        group = pipe.session.grid.replica_group(pipe.stages[0])
        assert group is not None
        pipe.flush()
        sums = group._get_sequence_number_for_group()
        got = []
        for part in parts:
            for batch in part[:-1]:
                if averages:
                    got.append(pipe.train_step(*batch[own].args, target=batch[own].target))
                else:
                    with pipe.no_sync():
                        got.append(pipe.train_step(*batch[own].args, target=batch[own].target))
            last = part[-1][own]
            got.append(pipe.train_step(*last.args, target=last.target))
            opt.step()
        state = copy_of(pipe.state_dict())
        if averages and pipelines == 1:  # else there are others beside
            # Gradients go to the replicas that add them, and each of these gives its sum to all:
            # with each of the others in turn.
            exchanges = group._get_sequence_number_for_group() - sums
            assert exchanges == 2 * (WIDTH - 1) * len(lengths), exchanges
        assert [float(loss) for loss in got] == want
    assert_same_state(state, {name: model.state_dict()[name] for name in state})


def disagree(rank: int) -> None:
    task = TASKS["skips"]
    (batch,) = task.batches([2 * M])
    options: dict[str, Any] = {"width": WIDTH}
    with pytest.raises(ValueError, match=r"accumulate must be the same on every rank.*rank 1: 2"):
        make_pipeline(task, NUM_STAGES, M, batch, accumulate=1 + rank, **options)
    with pytest.raises(ValueError, match="accumulate: 0, it must be at least 1"):
        make_pipeline(task, NUM_STAGES, M, batch, accumulate=0, **options)
    with make_pipeline(task, NUM_STAGES, M, batch, accumulate=2, **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        pipe.train_step(*batch.args, target=batch.target)
        if rank == 1:
            with pytest.raises(ValueError, match="1 calls for 1 train_steps"):
                opt.step()
        pipe.train_step(*batch.args, target=batch.target)
        if rank != 2:
            opt.step()
        with pytest.raises(ValueError, match="0 calls for 2 train_steps"):
            pipe.train_step(*batch.args, target=batch.target)
        if rank == 2:
            opt.step()
        pipe.train_step(*batch.args, target=batch.target)
    with make_pipeline(task, NUM_STAGES, M, batch, **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pytest.raises(ValueError, match=r"rank 0: outside, rank 1: inside, rank 2: inside"):
            if rank == 0:
                pipe.train_step(*batch.args, target=batch.target)
            else:
                with pipe.no_sync():
                    pipe.train_step(*batch.args, target=batch.target)
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()


def accumulate(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    for schedule in ("2bw", "1f1b", "chimera"):
        check([3, 3, 3], schedule, averages=True)
        check([1, 3, 2], schedule, averages=False)
    disagree(rank)


def test_replicas_add_up_their_gradients_once_for_each_optimizer_step() -> None:
    run_ranks(accumulate, WIDTH * NUM_STAGES, timeout=120)
