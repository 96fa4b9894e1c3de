"""Checkpoints inside the model, by hooks and reentrant, change no bit, around dropout too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

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
