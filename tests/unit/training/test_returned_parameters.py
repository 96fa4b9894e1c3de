"""Parameters that the model returns as they are, so that the loss may use them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.runs.trajectory import (
    assert_same,
    by_oracle,
    by_pipeline,
    make_pipeline,
    stage_of_parameters,
)
from tests.samples.models import TASKS, VOCABULARY, WIDTH


class ForTheLoss(nn.Module):
    """The last layer's work is the loss's; its weight may be the first layer's, too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x, self.head.weight


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    hidden, weight = output
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "2bw_split"])
def test_they_are_trained_where_they_are_returned(schedule: str, tied: bool) -> None:
    task = dataclasses.replace(
        TASKS["gpt"], build=lambda: ForTheLoss(tied=tied), loss_fn=loss_of, training=True
    )
    batches = task.batches([8] * 5)
    want = by_oracle(task, batches, 4, schedule=schedule)
    for _ in range(4):  # in another stage's thread they were trained by chance
        assert_same(by_pipeline(task, batches, 3, 4, schedule=schedule), want, exact=not tied)
    with make_pipeline(task, 3, 4, batches[0]) as pipe:
        assert stage_of_parameters(pipe).get("head.weight", 2) == 2
        assert not any(p.unused_parameters for p in pipe.session.modes.first.programs)
