"""Warm-up and remedies for the delay, where every process knows its own stages only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, RMSprop

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.references.remedies import Corrected, Discounted
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of, make_pipeline
from tests.samples.models import TASKS, whole

NUM_BATCHES, WARMUP = 7, 2
Make = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.5)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return RMSprop(parameters, lr=0.01)


def check(width: int, schedule: str, v: int, make: Make, remedies: Any, plain: Any) -> None:
    """On every rank; each compares what it holds."""
    task = TASKS["skips"]
    ranks = torch.distributed.get_world_size() // width
    d, m = ranks * v, 2 * ranks * v
    own = torch.distributed.get_rank() // ranks
    by_replica = [task.batches([2 * m] * NUM_BATCHES, seed=10 + r) for r in range(width)]
    model = whole(task.model())
    stock = plain(make(model.parameters()))
    oracle = Oracle(model, stock, m, task.loss_fn, delay=1, warmup_batches=WARMUP)
    want = [oracle.train_replicas(batches)[own] for batches in zip(*by_replica, strict=True)]
    options = {"width": width, "schedule": schedule, "stages_per_rank": v}
    with make_pipeline(task, d, m, by_replica[0][0], warmup_batches=WARMUP, **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=remedies)
        losses = []
        for batch in by_replica[own]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        state, saved = copy_of(pipe.state_dict()), opt.state_dict()["staleness"]
        got = [float(loss) for loss in losses]
    names = {name for name, _ in model.named_parameters()} & state.keys()
    assert set(saved["kept"]) in (set(), names)
    assert got == want
    for name, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def feedback(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    both = [pd2.LearningRateDiscount(4), pd2.ErrorFeedback()]
    nesterov = pd2.NesterovCorrection(0.7)

    def fed_back(inner: Any) -> Any:
        return Discounted(Corrected(inner, "error feedback", 1.0, WARMUP), 4, WARMUP)

    def looking_ahead(inner: Any) -> Any:
        return Corrected(inner, "nesterov", 0.7, WARMUP)

    for make in (momentum, rmsprop):
        check(width, "2bw", 1, make, both, fed_back)
        check(width, "2bw", 1, make, nesterov, looking_ahead)
    check(width, "interleaved_2bw", 2, momentum, both, fed_back)
    disagree(rank, world // width, width)


def disagree(rank: int, d: int, width: int) -> None:
    task = TASKS["skips"]
    batch = task.batches([2 * d])[0]
    with pytest.raises(ValueError, match="warmup_batches must be the same"):
        make_pipeline(task, d, d, batch, width=width, warmup_batches=rank)
    discount = pd2.LearningRateDiscount
    with make_pipeline(task, d, d, batch, width=width) as pipe:
        for remedies, message in (
            ([discount(1 + rank)], "staleness must be the same"),
            (discount(1 if rank else -1), "num_batches: -1"),
        ):
            with pytest.raises(ValueError, match=message):
                pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=remedies)
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1))


@pytest.mark.parametrize(("world", "width"), [(2, 1), (4, 2)])
def test_processes_train_as_the_rules_say(world: int, width: int) -> None:
    run_ranks(feedback, world, args=(width,), timeout=120)
