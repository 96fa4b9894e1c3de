"""Stages under autocast compute what the unsplit model does under the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs.trajectory import Trajectory, assert_same, by_oracle, by_pipeline, make_pipeline
from tests.samples.models import TASKS, Task


class Under(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", dtype=self.dtype, cache_enabled=False):
            return self.model(*args)


def under(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Any:
    def wrapped(*args: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            return function(*args)

    return wrapped


def want(task: Task, batches: Any, m: int, dtype: torch.dtype, schedule: str) -> Trajectory:
    wrapped = Task(task.build, task.draw, under(task.loss_fn, dtype))
    found = by_oracle(wrapped, batches, m, schedule=schedule, model=Under(task.model(), dtype))
    state = {name.removeprefix("model."): tensor for name, tensor in found.state.items()}
    return Trajectory(found.losses, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "options"),
    [
        ("2bw", 1, {}),
        ("2bw", 4, {}),
        ("1f1b", 2, {}),
        ("2bw", 2, {"recompute": True}),
        ("zero_bubble", 2, {}),
    ],
)
def test_autocast_is_the_unsplit_models(
    schedule: str, num_stages: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    for name in ("skips", "gpt"):
        task = TASKS[name]
        batches = task.batches([8] * 5)
        got = by_pipeline(
            task, batches, num_stages, 4, schedule=schedule, autocast=dtype, **options
        )
        expected = want(task, batches, 4, dtype, schedule)
        assert_same(got, expected)
        assert got.losses != by_oracle(task, batches, 4, schedule=schedule).losses


def test_recomputed_blocks_and_evaluation_run_under_autocast() -> None:
    task = TASKS["skips"]
    batches = task.batches([8] * 4)
    expected = want(task, batches, 4, torch.bfloat16, "2bw")
    got = by_pipeline(
        task, batches, 2, 4, autocast=torch.bfloat16, recompute=["layers.1", "layers.4"]
    )
    assert_same(got, expected)
    model = task.model()
    x = batches[0].args[0]
    with make_pipeline(task, 2, 4, batches[0], autocast=torch.bfloat16) as pipe, torch.no_grad():
        assert torch.equal(pipe(x), Under(model, torch.bfloat16)(x))
    around = torch.autocast("cpu", dtype=torch.bfloat16)  # of the caller's thread alone
    with around, pytest.raises(ValueError, match=r"autocast=torch\.bfloat16, which is None now"):
        by_pipeline(task, batches, 2, 4)
