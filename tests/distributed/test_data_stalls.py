"""Data stalls where each process feeds its own stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.timed import at_most_three_times
from tests.unit.extras.test_data_stalls import ROWS, WIDTH, Loader


class Fails(Loader):
    """Gives some batches, of all its iterations together, and fails then."""

    def __init__(self, fails: bool, count: int) -> None:
        super().__init__()
        self.fails, self.left = fails, count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for item in super().__iter__():
            if self.fails and self.left == 0:
                raise OSError("no such file")
            self.left -= 1
            yield item


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
        stalls = pd2.data_stalls(Loader(0.020 * rank), pipe, batches=5)
        failures = []
        for loader in (Fails(rank == 1, 0), Fails(rank == 1, 2), Fails(rank == 1, 6)):
            try:
                pd2.data_stalls(loader, pipe, batches=4)
            except (OSError, ValueError) as error:
                failures.append(str(error))
        assert len(failures) == 3, failures
        assert all("no such file" in text for text in failures), failures
        with pytest.raises(TypeError, match="loader: list_iterator given"):  # on both at once
            pd2.data_stalls(iter([(x, x)]) if rank == 1 else [(x, x)], pipe, batches=1)
        rows = TensorDataset(torch.randn(48, WIDTH), torch.randn(48, WIDTH))
        pd2.data_stalls(DataLoader(rows, batch_size=8, num_workers=rank), pipe, batches=2)
        loss = pipe.train_step(x, target=x)
        return stalls, float(loss)


@at_most_three_times
def test_slow_targets_stall_the_rank_of_the_last_stage() -> None:
    first, last = (result.value for result in run_ranks(measured, 2, timeout=120))
    assert first[1] == last[1]
    assert first[0].loading < 0.010
    assert last[0].loading > 0.019
    assert set(first[0].waiting) == {0}
    assert set(last[0].waiting) == {1}
    assert first[0].waiting[0] < 0.3 < last[0].waiting[1]
    for stalls, _ in (first, last):  # all wait for the slowest
        assert stalls.stall == pytest.approx(last[0].loading - stalls.synthetic, abs=0.008)
