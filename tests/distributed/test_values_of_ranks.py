"""Ranks send plain tensors, and replicas begin with the same values: others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Tagged(torch.Tensor):
    """A class of tensors that another process would not give back."""


class Tags(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.as_subclass(Tagged) if bool(x.abs().max() < 100) else y


def train_tagged(rank: int) -> list[str]:
    torch.manual_seed(0)
    layers = [Tags(4, 4), nn.Linear(4, 4)]
    with pd2.PipelineModule(layers, mse_loss, num_microbatches=2, example_args=(X,)) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pytest.raises(pd2.errors.StageError) as caught:
            pipe.train_step(X, target=X)
            pipe.flush()
        loss = pipe.train_step(X * 1000, target=X)  # the run goes on
        optimizer.step()
        return [str(caught.value), str(float(loss))]


def make_replicas(rank: int, what: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        if what == "weight" and rank == 1:
            model[0].weight[2, 3] += 1
        if what == "buffer" and rank == 1:
            model[1].running_mean += 1
    try:
        with pd2.PipelineModule(
            model, mse_loss, num_stages=1, width=2, num_microbatches=2, example_args=(X,)
        ):
            return "made"
    except ValueError as error:
        return str(error)


def work(rank: int, world: int) -> dict[str, Any]:
    replicas = {what: make_replicas(rank, what) for what in ("nothing", "weight", "buffer")}
    return {"tagged": train_tagged(rank), **replicas}


def test_values_that_ranks_cannot_share_are_refused_on_all() -> None:
    results = [result.value for result in run_ranks(work, 2)]
    for result in results:
        text, loss = result["tagged"]
        assert "TypeError: value " in text
        assert "between stages: a Tagged given, processes send plain tensors" in text
        assert loss == results[0]["tagged"][1]
        assert result["nothing"] == "made"
        assert "rank 1, of replica 1, has other values of 0.weight and 0 more" in result["weight"]
        assert "other values of 1.running_mean and 0 more" in result["buffer"]
