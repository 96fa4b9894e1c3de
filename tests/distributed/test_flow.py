"""Lengths, structures, added losses, metrics and compiled stages between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import in_turn, run_ranks
from tests.runs.trajectory import (
    assert_close,
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    copy_of,
    make_pipeline,
    sgd,
)
from tests.samples.flow_models import CARRYING, adding, any_length, nested, raising
from tests.samples.models import TASKS, Task, whole
from tests.unit.model.test_metrics import METRICS, want


def check(
    make: Any, d: int, m: int, rows: list[int], oracle: Task | None = None, **options: Any
) -> None:
    """``make`` gives the task anew: its draws go on where the last ones ended."""
    batches = make().batches(rows)
    theirs = by_oracle(oracle or make(), batches, m)
    ours = by_pipeline(make(), batches, d, m, **options)
    theirs.state = {name: theirs.state[name] for name in ours.state}
    if oracle is None:
        assert_same(ours, theirs)
    else:
        assert_same_state(ours.state, theirs.state)


def everything_flows(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    d, m = world_size, world_size + 1
    rows = [2 * m, 3 * m + 1, m, 2 * m]
    for options in ({}, {"recompute": True}, {"schedule": "2bw_split"}):
        check(lambda: any_length([5, 9, 1, 3]), d, m, rows, **options)
        check(lambda: CARRYING, d, m, rows, **options)
        check(lambda: nested(gated=False, power=3), d, m, rows, **options)
        for opaque in (False, True):
            check(lambda: raising(opaque=opaque), d, m, rows, adding(), **options)  # noqa: B023


def metrics_reach_every_rank(rank: int, world_size: int) -> list[dict[str, float]]:
    task, d, m = TASKS["skips"], world_size, world_size
    batches = task.batches([2 * m, 2 * m + 1, m])
    with make_pipeline(task, d, m, batches[0], metrics=METRICS) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        assert losses[0].metrics["error"] > 0  # before the batches after it are done
    got = [loss.metrics for loss in losses]
    for ours, theirs in zip(got, want(batches, 1), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    # A mistake on one rank is told to all.
    wrong: Any = {**METRICS, "error": 3} if rank == world_size - 1 else METRICS
    with pytest.raises(TypeError, match=r"metrics\['error'\]: 3 given"):
        make_pipeline(task, d, m, batches[0], metrics=wrong)
    wrong = {"other": METRICS["error"]} if rank == 0 else METRICS
    with pytest.raises(ValueError, match="metrics"):
        make_pipeline(task, d, m, batches[0], metrics=wrong)
    with pytest.raises(RuntimeError, match=r"metrics\['wrong'\] returned str"):
        text: Any = {"wrong": lambda output, target: "good"}
        with make_pipeline(task, d, m, batches[0], metrics=text) as pipe:
            float(pipe.train_step(*batches[0].args, target=batches[0].target))
    return got


def replicas_average_added_losses(rank: int, world_size: int) -> None:
    """width 2; every replica its own batch."""
    width, d, m = 2, world_size // 2, world_size // 2 + 1
    task, reference = raising(), adding()
    batches = [task.batches([2 * m, 2 * m + 1, 2 * m], seed=seed) for seed in range(width)]
    model = whole(reference.model())
    oracle = Oracle(model, sgd(model.parameters()), m, reference.loss_fn, 1)
    for of_replicas in zip(*batches, strict=True):
        oracle.train_replicas(of_replicas)
    with make_pipeline(task, d, m, batches[0][0], width=width, metrics=METRICS) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches[pipe.replica]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        state = copy_of(pipe.state_dict())
        assert all(loss.metrics["error"] > 0 for loss in losses)
    for name, ours in state.items():
        assert_close(name, ours, model.state_dict()[name])


def compiled_stages(rank: int, world_size: int) -> None:
    from torch._dynamo.utils import counters

    task, m = TASKS["gpt"], world_size
    batches = task.batches([2 * m] * 4)
    theirs = by_oracle(task, batches, m)
    ours = by_pipeline(task, batches, world_size, m, compile={"backend": "aot_eager"})
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(theirs.losses))
    for name, value in ours.state.items():
        torch.testing.assert_close(value, theirs.state[name], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, *exhaustive(4)])
def test_what_flows_in_processes_equals_the_definition(num_ranks: int) -> None:
    """With metrics on every rank, and with replicas that average added losses."""
    checks = [everything_flows, metrics_reach_every_rank, replicas_average_added_losses]
    results = run_ranks(in_turn, num_ranks, args=checks, timeout=280)
    assert all(result.value[1] == results[0].value[1] for result in results)


@pytest.mark.exhaustive  # threads have compiled stages, and processes all else
@pytest.mark.timeout(300)
def test_stages_are_compiled_in_processes() -> None:
    run_ranks(compiled_stages, 2, timeout=280)
