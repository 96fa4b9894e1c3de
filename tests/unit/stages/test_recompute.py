"""Stages that recompute their activations give the same bits, and hold less."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, check_task
from tests.samples.flow_models import random_batch
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.recompute_models import Attention, Counts, WritesInput, homogeneous, total

SCHEDULES = {"2bw": 1, "2bw_split": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_2bw": 2}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, schedule) for name in TASKS for schedule in ("2bw_split", "interleaved_2bw")),
        *(("drawing", schedule) for schedule in ("2bw", "1f1b", "zero_bubble")),
        # Every schedule draws again in test_exactness.py.
        *exhaustive(
            *(
                (name, schedule)
                for name in TASKS
                for schedule in ("2bw", "1f1b", "zero_bubble")
                if name != "drawing"
            )
        ),
    ],
)
def test_recomputed_training_equals_the_definition(name: str, schedule: str) -> None:
    v = SCHEDULES[schedule]
    depths = [d for d in TASKS[name].depths if d % v == 0]
    for d in depths[-2:]:  # every depth: test_exactness
        options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
        check_task(TASKS[name], d, 2 * d, rows=[4 * d] * 4, recompute=True, **options)


@pytest.mark.parametrize("recompute", ["auto", [True, False, True]])
def test_stages_may_differ(recompute: Any) -> None:
    check_task(TASKS["skips"], 3, 4, rows=[9, 8, 11, 8], recompute=recompute)


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.5), Attention])
@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble", "gpipe"])
@pytest.mark.parametrize("recompute", [True, [True, False, False]])
def test_the_second_forward_draws_the_numbers_of_the_first(
    schedule: str, recompute: Any, make: Any
) -> None:
    # The output is linear in each weight, so the loss is <w, gradient>, if both saw one mask.
    torch.manual_seed(0)
    stages = [stage.double() for stage in homogeneous(make())]
    before = [stage[0].weight.detach().clone() for stage in stages]  # type: ignore
    x = torch.randn(12, WIDTH, dtype=torch.float64)
    with pd2.PipelineModule(
        stages,
        total,
        num_microbatches=4,
        schedule=schedule,
        example_args=(x,),
        recompute=recompute,
        loss_reduction="sum",
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=1.0))
        loss = pipe.train_step(x)
        while not loss.done():
            torch.rand(1)  # whoever draws beside the pipeline changes nothing
        optimizer.step()
        state = pipe.state_dict()
        assert abs(loss.item()) > 1e-3
        for old, new in zip(before, state.values(), strict=True):
            assert torch.sum(old * (old - new)).item() == pytest.approx(loss.item(), rel=1e-9)


def test_inputs_that_are_written_and_buffers_that_change_are_kept() -> None:
    def make() -> list[nn.Module]:
        return [nn.Sequential(WritesInput(), Counts()), nn.Sequential(Counts(), nn.Tanh())]

    task = Task(make, random_batch)
    batches = task.batches([8] * 4)
    want = by_oracle(task, copy.deepcopy(batches), 4)  # which writes to its inputs
    assert_same(by_pipeline(task, batches, 2, 4, recompute=True), want)


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.linear(x)


def test_a_stage_recomputes_while_the_gradient_is_under_way() -> None:
    x = torch.randn(4, 4)
    with pd2.PipelineModule(
        [Sleeps(), Sleeps()],
        F.mse_loss,
        num_microbatches=2,
        schedule="gpipe",
        example_args=(x,),
        recompute=True,
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pipe.timeline() as timeline:
            pipe.train_step(x, target=x)
            optimizer.step()
    at = {(e.stage, e.kind, e.microbatch): e for e in timeline.rows}
    # Stage 0 has forwarded long before stage 1 can send it a gradient.
    assert at[0, "R", 0].start < at[1, "B", 0].start
    assert at[0, "R", 0].end <= at[0, "B", 0].start
    assert at[0, "R", 0].end - at[0, "R", 0].start >= 0.02


def test_what_is_held_is_what_was_received_and_one_microbatchs_activations() -> None:
    d, m, rows, width = 3, 6, 8, 32

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    reports = {}
    for recompute in (False, True):
        with pd2.PipelineModule(
            [make() for _ in range(d)],
            F.mse_loss,
            num_microbatches=m,
            example_args=(torch.randn(2, width),),
            recompute=recompute,
            timeout=60.0,
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            for _ in range(3):
                pipe.train_step(torch.randn(m * rows, width), target=torch.randn(m * rows, width))
                optimizer.step()
            pipe.flush()
            reports[recompute] = pipe.memory_report()
    received = rows * width * 4
    kept, held = ([reports[r][i].activations for i in range(d)] for r in (False, True))
    for stage in range(d):
        in_flight = d - stage
        # The input of stage 0 is the user's; of the others it is received, not computed.
        one = kept[stage] // in_flight - (received if stage else 0)
        assert held[stage] == one + (in_flight * received if stage else 0)
        assert reports[True][stage].most_in_flight == in_flight
    assert held[0] * 3 == kept[0]


@pytest.mark.parametrize(
    ("recompute", "error", "message"),
    [
        (
            "always",
            ValueError,
            r"recompute: 'always', known: True, False, 'auto'",
        ),
        ([True], ValueError, r"recompute: 1 given, num_stages: 2: give one a stage"),
        ([1, 0], TypeError, r"recompute: \[1, 0\] given, it must be a bool"),
        (3, TypeError, r"recompute: 3 given"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(recompute: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        pd2.PipelineModule(
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            F.mse_loss,
            num_microbatches=2,
            example_args=(torch.randn(2, 2),),
            recompute=recompute,
        )
