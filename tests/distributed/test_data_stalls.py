"""Data stalls where each process feeds its own stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.unit.pipeline.test_data_stalls import ROWS, WIDTH, Loader


def measured(rank: int, world_size: int) -> tuple[pd2.DataStalls, float]:
    torch.manual_seed(0)
    model = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    x = torch.randn(ROWS, WIDTH)
    with pd2.PipelineModule(
        model,
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(x,),
        timeout=60.0,
    ) as pipe:
        stalls = pd2.data_stalls(Loader(0.020 * rank), pipe, batches=10)
        loss = pipe.train_step(x, target=x)
        return stalls, float(loss)


def test_slow_targets_stall_the_rank_of_the_last_stage() -> None:
    first, last = (result.value for result in run_ranks(measured, 2, timeout=120))
    assert first[1] == last[1]
    assert first[0].loading < 0.010
    assert last[0].loading > 0.019
    assert set(first[0].waiting) == {0}
    assert set(last[0].waiting) == {1}
    assert first[0].waiting[0] < 0.3 < last[0].waiting[1]
    for stalls, _ in (first, last):  # all wait for the slowest
        assert stalls.stall == pytest.approx(0.020 - stalls.cached, abs=0.008)
