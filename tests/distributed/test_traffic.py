"""What stages in processes move: each rank's report is of its own stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.launch import run_ranks

WIDTH = 6


def reported(width: int, *, shares: bool = False) -> dict[int, dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with pd2.PipelineModule(
        model,
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        width=width,
        split=["2"],
        example_args=(x,),
        timeout=60.0,
    ) as pipe:
        if shares:
            pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), shard_state=True)
        report = pd2.traffic_report(pipe, x, microbatch_rows=2, figures=pd2.KNOWN_DEVICES["v100"])
        return {index: dataclasses.asdict(stage) for index, stage in report.stages.items()}


def rank_reported(rank: int, world_size: int) -> list[dict[int, dict[str, Any]]]:
    return [reported(2), reported(2, shares=True)]


def test_each_process_reports_its_stages_and_replicas_exchange_their_gradients() -> None:
    alone = reported(1)
    results = run_ranks(rank_reported, 4, timeout=120)  # two replicas of two stages
    for rank, result in enumerate(results):
        ((stage, found),) = result.value[0].items()
        update = result.value[1][stage]["update"]  # of a share: half of it
        assert update["weights"] == found["update"]["weights"] / 2
        assert update["gradients"] == found["update"]["gradients"] / 2
        assert update["messages"] == found["update"]["messages"]
        assert stage == rank % 2
        parameters = WIDTH * WIDTH + WIDTH
        # Of two each sends half of the gradients, then half of the sums, and receives as much.
        assert found["update"].pop("messages") == 2 * 4 * parameters
        expected = {
            kind: dict(value) if isinstance(value, dict) else value
            for kind, value in alone[stage].items()
        }
        expected["update"].pop("messages")
        assert found == expected
