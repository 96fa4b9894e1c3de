"""Checkpoints inside the model, by hooks and reentrant, change no bit, around dropout too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import pipedream2bw as pd2
from tests.runs.trajectory import check_task
from tests.samples.flow_models import random_batch
from tests.samples.models import WIDTH, Task


class Saving(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.dropout(self.up(x), 0.2, self.training).tanh()).tanh()
        return y

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.computed, x, use_reentrant=self.reentrant)


class SavingInside(nn.Module):
    """The blocks save for themselves."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Saving(reentrant) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class SavingOutside(nn.Module):
    """The model saves for its blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [SavingInside, SavingOutside])
def test_checkpoints_inside_the_model_change_no_bit(
    kind: Any, reentrant: bool, num_stages: int, schedule: str, recompute: bool
) -> None:
    m = num_stages + 1
    task = Task(lambda: kind(reentrant), random_batch)
    check_task(task, num_stages, m, [2 * m] * 4, schedule=schedule, recompute=recompute)


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matrix = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_matrix else CheckpointPolicy.PREFER_RECOMPUTE


class SavingSome(Saving):
    """What a selective checkpoint does not save it computes again, under a dispatch mode."""

    def forward(self, x: torch.Tensor) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.computed, x, use_reentrant=False, context_fn=contexts)


class SavingSomeInside(SavingInside):
    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.blocks = nn.ModuleList([SavingSome(False) for _ in range(4)])


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw_split", "zero_bubble"])
def test_selective_checkpoints_draw_the_same_again_and_once(schedule: str) -> None:
    task = Task(SavingSomeInside, random_batch)
    check_task(task, 2, 3, [6] * 4, schedule=schedule)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_changes_no_number_that_is_drawn() -> None:
    x = torch.ones(20)
    drawn = []
    for mode in (None, Watching()):
        with pd2.reference_random(seed=1, train_step=0, microbatch=0):
            if mode:
                mode.__enter__()
            drawn.append(
                [
                    *(F.dropout(x), torch.empty(3).normal_(), torch.bernoulli(x / 2)),
                    *(torch.randn_like(x), torch.rand(3), torch.native_dropout(x, 0.5, True)[0]),
                    torch.randint(9, (5,)),
                ]
            )
            if mode:
                mode.__exit__(None, None, None)
    assert all(map(torch.equal, *drawn))
