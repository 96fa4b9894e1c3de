"""What runs inside stages between processes: users' hooks and checkpoints, torch.profiler."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of, drawing, make_pipeline, sgd
from tests.samples.flow_models import random_batch
from tests.samples.models import TASKS, Task
from tests.unit.model.test_module_hooks import KINDS, NAMES, Layers, count_calls
from tests.unit.runtime.test_profiler_ranges import assert_ranges_are_the_timelines_actions
from tests.unit.training.test_checkpointed_models import SavingInside, SavingOutside

NUM_BATCHES = 3


def hooks_run_once_per_microbatch(width: int, schedule: str, m: int) -> None:
    """Of a module of one process's stage there, and nowhere else in its replica."""
    d = dist.get_world_size() // width
    model = Layers()
    calls = count_calls(model, NAMES)
    task = Task(lambda: model, random_batch)
    batches = task.batches([2 * m] * NUM_BATCHES)
    with make_pipeline(task, d, m, batches[0], width=width, schedule=schedule) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            optimizer.step()
        pipe.flush()
        own = {name.rsplit(".", 1)[0] for name in pipe.state_dict()}
    here = {name for name in NAMES if any(f"{module}.".startswith(f"{name}.") for module in own)}
    assert calls == {(name, kind): NUM_BATCHES * m for name in here for kind in KINDS}
    of_all: list[Counter[tuple[str, str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, calls)
    everywhere = sum((each for each in of_all if each is not None), Counter())
    assert everywhere == {(name, kind): width * NUM_BATCHES * m for name in NAMES for kind in KINDS}


def checkpoints_change_nothing(width: int, schedule: str, m: int) -> None:
    d = dist.get_world_size() // width
    for kind, reentrant in ((SavingInside, False), (SavingInside, True), (SavingOutside, False)):
        task = Task(lambda kind=kind, reentrant=reentrant: kind(reentrant), random_batch)
        by_replica = [task.batches([2 * m] * 4, seed=seed) for seed in range(width)]
        model = task.model()
        oracle = Oracle(
            model, sgd(model.parameters()), m, task.loss_fn, int("2bw" in schedule), drawing=drawing
        )
        for batches in zip(*by_replica, strict=True):
            oracle.train_replicas(batches)
        with make_pipeline(task, d, m, by_replica[0][0], width=width, schedule=schedule) as pipe:
            optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            for batch in by_replica[pipe.replica]:
                pipe.train_step(*batch.args, target=batch.target)
                optimizer.step()
            state = copy_of(pipe.state_dict())
        for name, ours in state.items():
            theirs = model.state_dict()[name]
            assert torch.equal(ours, theirs), name


def ranges_are_the_timelines_actions(width: int, schedule: str, m: int) -> None:
    task = TASKS["skips"]
    d = dist.get_world_size() // width
    batches = task.batches([2 * m] * 4)
    with make_pipeline(task, d, m, batches[0], width=width, schedule=schedule) as pipe:
        assert_ranges_are_the_timelines_actions(pipe, m, batches)


def user_code_runs(rank: int, world_size: int, width: int) -> None:
    for schedule in ("2bw", "2bw_split", "1f1b"):
        m = world_size // width + 1
        hooks_run_once_per_microbatch(width, schedule, m)
        checkpoints_change_nothing(width, schedule, m)
        ranges_are_the_timelines_actions(width, schedule, m)


@pytest.mark.parametrize(("num_ranks", "width"), [(2, 1), *exhaustive((2, 2), (4, 1), (4, 2))])
def test_user_code_runs_in_processes_as_in_one(num_ranks: int, width: int) -> None:
    run_ranks(user_code_runs, num_ranks, args=[width], timeout=150)
