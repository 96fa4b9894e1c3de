"""How long a pipeline waits for its data, and that measuring it trains nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.discarding import restart_delay

WIDTH = 8
ROWS = 8


class Loader:
    """Batches that take some time, each another one."""

    def __init__(self, seconds: float = 0.0, count: int = 5) -> None:
        self.seconds, self.count = seconds, count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            time.sleep(self.seconds)
            x = torch.randn(ROWS, WIDTH, generator=generator)
            yield x, x.sin()


class Slow(nn.Module):
    """Takes some time for a microbatch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


@contextlib.contextmanager
def opened(seconds: float = 0.0, **options: Any) -> Iterator[pd2.PipelineModule]:
    torch.manual_seed(0)
    model = [Slow(seconds), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), Slow(seconds))]
    x = torch.randn(ROWS, WIDTH)
    usual: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "timeout": 60.0}
    with pd2.PipelineModule(
        model, nn.functional.mse_loss, example_args=(x,), **{**usual, **options}
    ) as pipe:
        yield pipe


def test_a_loader_slowed_by_20_ms_is_found() -> None:
    with opened() as pipe:
        stalls = pd2.data_stalls(Loader(0.020), pipe, batches=20)
    print(stalls)
    # A machine under load sleeps longer than it is asked to.
    assert 0.0195 < stalls.loading < 0.030
    # What the pipeline computes meanwhile is not waited.
    assert stalls.stall == pytest.approx(stalls.loading - stalls.cached, abs=0.005)
    assert stalls.share > 0.6
    assert set(stalls.waiting) == {0, 1}
    assert all(share > 0.5 for share in stalls.waiting.values())
    assert stalls.workers_needed >= 2
    assert stalls.with_workers(stalls.workers_needed) == stalls.cached
    assert "waited for data" in str(stalls)


def test_what_is_loaded_beside_the_work_is_no_stall() -> None:
    with opened(seconds=0.015) as pipe:  # 30 ms a batch on each stage
        stalls = pd2.data_stalls(Loader(0.010), pipe, batches=10)
    assert stalls.loading > 0.009
    assert stalls.share < 0.2
    assert stalls.workers_needed == 1
    assert "keeps up" in str(stalls)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
def test_measuring_changes_nothing_but_that_the_delay_begins_anew(schedule: str) -> None:
    def trained(*, measures: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        with opened(schedule=schedule) as pipe:
            pipe.session.random_seed = 7
            opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01))
            losses = []
            for number, (x, y) in enumerate(Loader()):
                if measures and number in (0, 3):
                    before = torch.get_rng_state()
                    pd2.data_stalls(Loader(count=3), pipe, batches=4)
                    assert torch.equal(torch.get_rng_state(), before)
                elif number == 3:
                    restart_delay(pipe)
                losses.append(pipe.train_step(x, target=y))
                opt.step()
            return [float(loss) for loss in losses], pipe.full_state_dict()

    losses, state = trained(measures=False)
    measured_losses, measured_state = trained(measures=True)
    assert measured_losses == losses
    assert all(torch.equal(measured_state[name], state[name]) for name in state)


def test_other_items_are_given_by_as_call() -> None:
    with opened() as pipe:
        items = [{"x": torch.randn(ROWS, WIDTH)}]
        stalls = pd2.data_stalls(
            items, pipe, 2, as_call=lambda item: pd2.Microbatch(item["x"], target=item["x"])
        )
        assert stalls.batches == 2


def test_bad_input_is_refused_by_name() -> None:
    with opened() as pipe:
        with pytest.raises(TypeError, match="loader: generator given, it must be iterable more"):
            pd2.data_stalls((item for item in Loader()), pipe)
        with pytest.raises(ValueError, match="batches: 0"):
            pd2.data_stalls(Loader(), pipe, 0)
        with pytest.raises(ValueError, match="loader: gives no batch"):
            pd2.data_stalls([], pipe)
        with pytest.raises(TypeError, match="loader: gives Tensor, data_stalls takes"):
            pd2.data_stalls([torch.zeros(ROWS, WIDTH)], pipe)
        with pytest.raises(TypeError, match="as_call: gives tuple, it must give"):
            pd2.data_stalls(Loader(), pipe, as_call=lambda item: item)
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        x = torch.randn(ROWS, WIDTH)
        pipe.train_step(x, target=x)
        with pytest.raises(ValueError, match="a batch waits for its opt"):
            pd2.data_stalls(Loader(), pipe)
        opt.step()
    with opened(accumulate=2) as pipe, pytest.raises(ValueError, match="accumulate is 2"):
        pd2.data_stalls(Loader(), pipe)


def test_a_loader_that_fails_leaves_the_pipeline_as_it_was() -> None:
    class Fails(Loader):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield next(super().__iter__())
            raise OSError("no such file")

    with opened() as pipe:
        before = {name: value.clone() for name, value in pipe.full_state_dict().items()}
        with pytest.raises(OSError, match="no such file"):
            pd2.data_stalls(Fails(), pipe, 3)
        after = pipe.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_start_of_an_iteration_is_no_stall() -> None:
    """As of a DataLoader whose workers start anew; this one begins three times in a run."""

    class StartsLate(Loader):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            time.sleep(0.2)
            yield from super().__iter__()

    with opened() as pipe:
        stalls = pd2.data_stalls(StartsLate(0.010, count=5), pipe, 15)
    assert 0.009 < stalls.loading < 0.02
    assert stalls.stall < 0.02  # 0.04 of each batch are starts


def test_numpys_random_numbers_go_on_as_if_nothing_had_been_measured() -> None:
    class Draws(Loader):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            np.random.rand()
            yield from super().__iter__()

    with opened() as pipe:
        np.random.seed(0)
        pd2.data_stalls(Draws(), pipe, 2)
        drawn = np.random.rand()
    np.random.seed(0)
    assert drawn == np.random.rand()
