"""Replicas that take different numbers of a batch's microbatches train what one model would."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Batch, Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import (
    MakeOptimizer,
    Trajectory,
    assert_same,
    by_pipeline,
    copy_of,
    drawing,
    go_on,
    make_pipeline,
    sgd,
    stage_of_parameters,
)
from tests.runs.transports import GLOO, TWO_MACHINES, over
from tests.samples.models import TASKS, Task, whole

SCHEDULES = {"2bw": 1, "2bw_fresh": 1, "2bw_split": 1, "1f1b": 1, "2bw_v": 2}
"""Stages of a rank."""


def batches_of(task: Task, numbers: Sequence[int], count: int, **rows: int) -> list[list[Batch]]:
    """Of each replica, in which a microbatch has two rows."""
    extra = rows.get("extra", 0)
    return [
        task.batches([2 * m + extra * ((replica + t) % 2) for t in range(count)], seed=10 + replica)
        for replica, m in enumerate(numbers)
    ]


def by_definition(
    task: Task,
    by_replica: Sequence[Sequence[Batch]],
    numbers: Sequence[int],
    schedule: str,
    make: MakeOptimizer = sgd,
    late_of: Mapping[str, int] | None = None,
    **options: Any,
) -> Trajectory:
    model = whole(task.model())
    if late_of is not None:
        options["late"] = [late_of[name] for name, _ in model.named_parameters()]
    oracle = Oracle(
        model,
        make(model.parameters()),
        numbers,
        task.loss_fn,
        delay=int("2bw" in schedule),
        num_pipelines=1 + int(schedule == "chimera"),
        drawing=drawing,
        **options,
    )
    losses = [oracle.train_replicas(batches)[0] for batches in zip(*by_replica, strict=True)]
    return Trajectory(losses, copy_of(model.state_dict()))


def follows(
    task: Task,
    d: int,
    by_replica: Sequence[Sequence[Batch]],
    numbers: Sequence[int],
    schedule: str = "2bw",
    make: MakeOptimizer = sgd,
    *,
    exact: bool = True,
    optimizer: Any = None,
    **options: Any,
) -> None:
    """On every rank: compares losses, and the parameters that it holds, with the definition."""
    shared: dict[str, Any] = {k: options[k] for k in ("loss_reduction",) if k in options}
    options |= {"width": len(numbers), "schedule": schedule}
    with make_pipeline(task, d, numbers, by_replica[0][0], **options) as pipe:
        assert pipe.num_microbatches == numbers[pipe.replica]
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **optimizer or {})
        if schedule == "2bw_fresh":
            of_each = stage_of_parameters(pipe).items()
            shared["late_of"] = {name: d - stage for name, stage in of_each}
        losses = []
        for batch in by_replica[pipe.replica]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    want = by_definition(task, by_replica, numbers, schedule, make, **shared)
    held = {name: want.state[name] for name in got.state}
    assert_same(got, Trajectory(want.losses, held), exact=exact)


def least(schedule: str, d: int) -> int:
    for m in range(1, 4 * d + 1):
        try:
            pd2.make_schedule(schedule, d, m, SCHEDULES[schedule])
        except ValueError:
            continue
        return m
    raise LookupError(f"{schedule}, {d} stages")


def every_schedule(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    task, ranks = TASKS["drawing"], world // width
    for schedule, v in SCHEDULES.items():
        d = ranks * v
        numbers = random.Random(repr((schedule, world, width))).choices(range(5), k=width)
        numbers = [least(schedule, d) + number for number in numbers]
        for extra in (0, 1):  # also microbatches of different rows
            by_replica = batches_of(task, numbers, 4, extra=extra)
            follows(task, d, by_replica, numbers, schedule, stages_per_rank=v)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "width"), [(2, 2), *exhaustive((4, 2), (4, 4), (8, 4))])
def test_unequal_replicas_train_what_one_model_with_all_microbatches_does(
    world: int, width: int
) -> None:
    run_ranks(every_schedule, world, args=(width,), timeout=170)


# ---------------------------------------------------------------- what goes with it, w = d = 2


def the_loss_is_the_whole_batchs(rank: int, world: int) -> None:
    """Read at once, by one rank, under a schedule that forwards some of it later; with metrics."""
    task, d, numbers = TASKS["skips"], 4, (6, 5)
    by_replica = batches_of(task, numbers, 4, extra=1)
    want = by_definition(task, by_replica, numbers, "2bw_v")
    options: dict[str, Any] = {"schedule": "2bw_v", "stages_per_rank": 2, "width": 2}
    options["metrics"] = {"largest": lambda y, target: target[:, 0].mean()}
    with make_pipeline(task, d, numbers, by_replica[0][0], **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for number, batches in enumerate(zip(*by_replica, strict=True)):
            mine = batches[pipe.replica]
            loss = pipe.train_step(*mine.args, target=mine.target)
            opt.step()
            if number % 2 == 0 or rank == 1:
                assert float(loss) == want.losses[number]
            rows = torch.cat([batch.target[:, 0] for batch in batches])
            assert loss.metrics["largest"] == pytest.approx(float(rows.mean()), abs=1e-6)


def two_pipelines_and_sums(rank: int, world: int) -> None:
    for schedule, numbers, options in (
        ("chimera", (2, 6), {}),
        ("2bw", (3, 2), {"loss_reduction": "sum"}),
        ("2bw", (3, 3), {}),  # of one batch, whatever the numbers are
    ):
        task = dataclasses.replace(TASKS["skips"], loss_fn=small_sum if options else mse_loss)
        follows(task, 2, batches_of(task, numbers, 4, extra=1), numbers, schedule, **options)


def small_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / 128


def a_hook_averages(rank: int, world: int) -> None:
    """Of two replicas, so that the factor of two that hooks divide by changes no bit."""
    task, numbers = TASKS["skips"], (5, 2)
    by_replica = batches_of(task, numbers, 4)
    want = by_definition(task, by_replica, numbers, "2bw")
    with make_pipeline(task, 2, numbers, by_replica[0][0], width=2) as pipe:
        pipe.register_comm_hook(None, allreduce_hook)
        got = go_on(pipe, pd2.PipelineOptimizer(sgd(pipe.parameters())), by_replica[pipe.replica])
    held = {name: want.state[name] for name in got.state}
    assert_same(got, Trajectory(want.losses, held))


def several_train_steps_are_one_batch(rank: int, world: int) -> None:
    task, numbers = TASKS["skips"], (2, 5)
    by_replica = batches_of(task, numbers, 6, extra=1)
    model = whole(task.model())
    oracle = Oracle(model, sgd(model.parameters()), numbers, task.loss_fn, delay=1)
    steps = list(zip(*by_replica, strict=True))
    losses = [loss[0] for t in (0, 2, 4) for loss in oracle.train_together(steps[t : t + 2])]
    mine = by_replica[rank // 2]
    got = by_pipeline(task, mine, 2, numbers, accumulate=2, width=2)
    held = {name: model.state_dict()[name] for name in got.state}
    assert_same(got, Trajectory(losses, held))


def statistics_stay_a_replicas_own(rank: int, world: int) -> None:
    task, numbers = TASKS["batch norm"], (4, 2)
    by_replica = batches_of(task, numbers, 1)
    with make_pipeline(task, 2, numbers, by_replica[0][0], width=2) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        got = go_on(pipe, opt, by_replica[pipe.replica])
        replica = pipe.replica
    model = task.model()
    for part in by_replica[replica][0].args[0].tensor_split(numbers[replica]):
        model(part)
    names = [name for name in got.state if "running" in name]
    assert all(torch.equal(got.state[name], model.state_dict()[name]) for name in names)


def features(rank: int, world: int) -> bool:
    torch.set_num_threads(1)
    the_loss_is_the_whole_batchs(rank, world)
    two_pipelines_and_sums(rank, world)
    a_hook_averages(rank, world)
    several_train_steps_are_one_batch(rank, world)
    statistics_stay_a_replicas_own(rank, world)
    return True


@pytest.mark.slow
def test_what_goes_with_unequal_replicas_has_its_definition() -> None:
    assert all(result.value for result in run_ranks(features, 4, timeout=120))


def four_replicas(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    task, numbers = TASKS["skips"], (2, 1, 4, 1)
    follows(task, 1, batches_of(task, numbers, 6), numbers, metrics={"loss": task.loss_fn})


@pytest.mark.slow
@pytest.mark.parametrize("transport", [GLOO, TWO_MACHINES])
def test_the_loss_goes_from_replica_to_replica_without_shared_memory(transport: str) -> None:
    run_ranks(over, 4, args=(transport, four_replicas), timeout=60)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(pd2.schedule_names()), st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_what_replicas_agree_on_of_a_schedule_is_the_same_for_all_numbers_of_microbatches(
    name: str, d: int, v: int
) -> None:
    """Each has its own: they must update a rank's stages in one order, and wait for one norm."""
    made = []
    for m in range(1, 4 * d + 2):
        with contextlib.suppress(ValueError):
            made.append(pd2.make_schedule(name, d, m, v))
    assert len({str(agreed_on(schedule)) for schedule in made}) <= 1


def agreed_on(schedule: pd2.Schedule) -> list[object]:
    waits_for_all = True
    try:
        schedule.check_global_updates()
    except ValueError:
        waits_for_all = False
    ranks = range(max(schedule.placement) + 1)
    return [
        waits_for_all,
        [list(schedule.update_order(rank)) for rank in ranks],
        [schedule.placement, schedule.delay, schedule.num_versions, schedule.num_pipelines],
        [schedule.most_batches_behind, schedule.forward_batches_behind],
    ]
