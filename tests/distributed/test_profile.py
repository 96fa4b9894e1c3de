"""Profiles measured by several ranks at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.runs.launch import in_turn, run_ranks


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return {
        "model": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        "loss_fn": nn.functional.mse_loss,
        "example_args": (x,),
        "target": x,
        "microbatch_rows": (1, 4),
        "seconds": 0.01,
        "timeout": 60.0,
    }


def profiled(rank: int, world_size: int) -> pd2.Profile:
    return pd2.profile(**build())


def mistaken(rank: int, world_size: int) -> list[str]:
    def fails_for_real(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if rank == 1 and type(output) is torch.Tensor:  # neither traced nor fake
            raise ValueError("too hot")
        return nn.functional.mse_loss(output, target)

    reasons = []
    for changes in (
        {"microbatch_rows": (4, 1)} if rank == 1 else {},
        {"microbatch_rows": (1, 2 + rank)},
        {"parallel": 2},
        {"loss_fn": lambda output, target: output} if rank == 0 else {},
        {"loss_fn": fails_for_real},
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            pd2.profile(**build() | changes)
        reasons.append(str(raised.value))
    return reasons


@pytest.mark.parametrize("world_size", [3, *exhaustive(2)])
def test_all_ranks_get_one_profile_with_links_between_them(world_size: int) -> None:
    results = run_ranks(in_turn, world_size, args=(profiled, mistaken), timeout=120)
    profiles = [result.value[0] for result in results]
    assert all(profile == profiles[0] for profile in profiles)
    links = profiles[0].links
    assert links is not None
    ranks = range(world_size)
    for matrix, own in ((links.latency, 0.0), (links.bandwidth, math.inf)):
        assert [len(row) for row in matrix] == [world_size] * world_size
        for i in ranks:
            assert matrix[i][i] == own
            assert all(matrix[i][j] == matrix[j][i] for j in ranks)
    assert all(0 < links.bandwidth[i][j] < math.inf for i in ranks for j in ranks if i != j)
    sums = profiles[0].all_reduce
    assert {ranks for ranks, _, _ in sums} == ({2} if world_size == 2 else {2, 3})
    assert all(seconds > 0 for _, _, seconds in sums)
    assert len({size for _, size, _ in sums}) * len({ranks for ranks, _, _ in sums}) == len(sums)
    for rank, result in enumerate(results):
        order, differ, parallel, loss, real = result.value[1]
        assert order == ("" if rank == 1 else "rank 1: ") + (
            "microbatch_rows: 1 after 4, they must increase"
        )
        assert differ.startswith("microbatch_rows must be the same on every rank, got rank 0: 2")
        assert f"parallel: 2, processes: {world_size}" in parallel
        assert "loss_fn returned shape" in loss
        assert real == ("" if rank == 1 else "rank 1: ") + "too hot"
