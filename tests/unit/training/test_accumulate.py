"""Several train_steps are one batch of the optimizer: bit by bit what the definition says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.trajectory import (
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
    sgd,
    version_options,
)
from tests.samples.flow_models import adding, raising
from tests.samples.models import TASKS, whole
from tests.samples.schedule_sizes import sizes_for


@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_every_schedule_averages_the_train_steps_of_a_batch(schedule: str) -> None:
    for num_stages in (2, 4):
        for sizes in sizes_for(schedule, num_stages):
            d, m, v = dataclasses.astuple(sizes)
            options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
            check_task(TASKS["skips"], d, m, rows=[2 * m] * 9, accumulate=3, **options)
    uneven = [2 * m, 2 * m + 1, 3 * m, 2 * m, m, m + 1, 2 * m, m]
    check_task(TASKS["skips"], d, m, rows=uneven, accumulate=2, recompute=True, **options)


@pytest.mark.parametrize("name", [n for n in TASKS if 2 in TASKS[n].depths])
def test_every_model(name: str) -> None:
    check_task(TASKS[name], 2, 3, rows=[6] * 6, accumulate=2)


def test_losses_that_are_sums_are_added() -> None:
    def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    def gentle(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    task = dataclasses.replace(TASKS["skips"], loss_fn=sum_loss)
    for options in ({}, {"loss_reduction": "sum"}):
        check_task(task, 2, 3, [6, 7, 8, 6, 6, 5], gentle, accumulate=2, **options)


def test_losses_added_inside_the_model_are_averaged_too() -> None:
    batches = raising().batches([6, 7, 6, 6, 8, 6])
    want = by_oracle(adding(), batches, 3, accumulate=3)
    got = by_pipeline(raising(), batches, 2, 3, accumulate=3)
    assert_same_state(got.state, want.state)


class OwnAdam(torch.optim.Adam):
    """No fused pass knows it."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, OwnAdam])
def test_a_batch_may_be_interrupted_anywhere(kind: type[torch.optim.Optimizer]) -> None:
    """By what drains."""
    task, m = TASKS["skips"], 3
    batches = task.batches([6] * 12)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.01)

    def oracle_lr(number: int, trained: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number // 4)

    want = by_oracle(task, batches, m, make, oracle_lr, accumulate=4)
    interruptions: list[Callable[[pd2.PipelineModule], object]] = [
        lambda pipe: pipe.flush(),
        lambda pipe: pipe.state_dict(),
        lambda pipe: pipe.eval()(*batches[0].args) is pipe.train(),
    ]

    def between(number: int, pipe: Any, optimizer: Any) -> None:
        oracle_lr(number, pipe, optimizer)
        interruptions[number % 3](pipe)

    got = by_pipeline(task, batches, 2, m, make, between, accumulate=4)
    assert_same(got, want, exact=kind is torch.optim.SGD)


def test_gradients_stay_when_their_buffers_are_arranged_in_another_way() -> None:
    task, m = TASKS["skips"], 3
    batches = task.batches([6] * 12)
    # Other arrangements have no older versions: the delay starts anew, and never comes.
    want = by_oracle(task, batches, m, accumulate=4, schedule="1f1b")
    with make_pipeline(task, 2, m, batches[0], accumulate=4) as pipe:
        for number, batch in enumerate(batches):
            optimizer: Any = sgd(pipe.parameters())
            if number % 2:
                optimizer.__class__ = OwnSGD
            stepped = pd2.PipelineOptimizer(optimizer)
            pipe.train_step(*batch.args, target=batch.target)
            if number % 4 == 3:
                stepped.step()
        assert_same_state(copy_of(pipe.state_dict()), want.state)


class OwnSGD(torch.optim.SGD):
    """No fused pass knows it."""


def test_the_pipeline_is_not_drained_and_versions_count_optimizer_steps() -> None:
    task, d, m, n, num_batches = TASKS["skips"], 3, 4, 2, 4
    (batch,) = task.batches([2 * m])
    with make_pipeline(task, d, m, batch, accumulate=n) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.timeline() as timeline:
            for k in range(n * num_batches):
                loss = pipe.train_step(*batch.args, target=batch.target)
                assert loss.train_step == k
                if k % n == n - 1:
                    opt.step()
        assert all(report.most_live_versions <= 2 for report in pipe.memory_report().values())
    for event in timeline.rows:
        t = event.batch // n
        assert event.version == (t + 1 if event.kind == "U" else max(t - 1, 0))
    updates = [e for e in timeline.rows if e.kind == "U"]
    assert sorted((e.stage, e.batch) for e in updates) == [
        (stage, n * t + n - 1) for stage in range(d) for t in range(num_batches)
    ]
    at = {(e.stage, e.kind, e.batch, e.microbatch): e for e in timeline.rows}
    for k in range(n * num_batches - 1):
        assert at[0, "F", k + 1, 0].start < at[0, "B", k, m - 1].start


@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_under_no_sync_gradients_are_added(schedule: str) -> None:
    task = TASKS["skips"]
    for d, m, v in (dataclasses.astuple(sizes) for sizes in sizes_for(schedule, 2)):
        lengths = [1, 3, 2, 1, 1, 4]  # train_steps of each optimizer step
        batches = task.batches([2 * m] * sum(lengths))
        delay: Any = int("2bw" in schedule)
        model = whole(task.model())
        of_names = version_options(task, d, m, batches[0], schedule)
        of_each = {
            key: [of_name[name] for name, _ in model.named_parameters()]
            for key, of_name in of_names.items()
        }
        delay = of_each.get("delay_of", delay)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pipelines = 2 if "chimera" in schedule else 1
        late = of_each.get("late_of")
        oracle = Oracle(
            model, optimizer, m, task.loss_fn, delay, num_pipelines=pipelines, late=late
        )
        remaining = iter(batches)
        parts = [[next(remaining) for _ in range(length)] for length in lengths]
        want = [oracle.train_together([[b] for b in part], averages=False) for part in parts]
        options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
        with make_pipeline(task, d, m, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.05))
            losses = []
            for part in parts:
                with pipe.no_sync():
                    for batch in part[:-1]:
                        losses.append(pipe.train_step(*batch.args, target=batch.target))
                losses.append(pipe.train_step(*part[-1].args, target=part[-1].target))
                opt.step()
            state = copy_of(pipe.state_dict())
        assert [float(loss) for loss in losses] == [x for part in want for (x,) in part]
        assert_same_state(state, copy_of(model.state_dict()))


def linear_pipeline(**options: Any) -> tuple[pd2.PipelineModule, Callable[[], object]]:
    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        F.mse_loss,
        num_microbatches=2,
        example_args=(x,),
        timeout=60.0,
        **options,
    )
    return pipe, lambda: pipe.train_step(x, target=x)


def test_steps_that_come_too_early_or_too_late_are_named() -> None:
    pipe, train = linear_pipeline(accumulate=2)
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        rule = r"must follow every 2 train_steps \(accumulate=2\)"
        train()
        with pytest.raises(ValueError, match=rf"1 calls for 1 train_steps: .* {rule}"):
            opt.step()
        train()
        with pytest.raises(ValueError, match=rf"0 calls for 2 train_steps: .* {rule}"):
            train()
        opt.step()
        with pytest.raises(ValueError, match=rf"2 calls for 2 train_steps: .* {rule}"):
            opt.step()
        with pytest.raises(ValueError, match="accumulate is 2, it must be 1"), pipe.no_sync():
            pass
        train()
        train()
        opt.step()
    pipe, train = linear_pipeline()
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.no_sync(), pipe.no_sync():
            train()
        with pipe.no_sync():
            train()
        with pytest.raises(ValueError, match=r"0 train_steps and 2 under no_sync\(\): .* outside"):
            opt.step()
        train()
        with pytest.raises(ValueError, match="0 calls for 1 train_steps"), pipe.no_sync():
            train()
        opt.step()
        assert pipe.memory_report()[0].most_live_versions <= 2


@pytest.mark.parametrize(
    ("accumulate", "kind", "message"),
    [
        (0, ValueError, "accumulate: 0, it must be at least 1"),
        (-2, ValueError, "accumulate: -2, it must be at least 1"),
        (2.0, TypeError, r"accumulate: 2\.0 given, it must be an int"),
        (True, TypeError, "accumulate: True given"),
        ("2", TypeError, "accumulate: '2' given"),
    ],
)
def test_a_wrong_number_is_named(accumulate: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        linear_pipeline(accumulate=accumulate)
