"""How long a pipeline waits for its data, and that measuring it trains nothing."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pipedream2bw as pd2
from pipedream2bw.extras import stalls as stalls_module
from tests.runs.discarding import restart_delay
from tests.runs.timed import at_most_three_times

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


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that are slow to fetch the first time, as from a disk, by whichever process."""

    def __init__(self, fetching: float, preparing: float) -> None:
        self.fetching, self.preparing = fetching, preparing
        self.in_memory = torch.zeros(2000, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.in_memory)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.preparing + (0 if self.in_memory[row] else self.fetching))
        self.in_memory[row] = True
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


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


@at_most_three_times
def test_a_loader_slowed_by_20_ms_is_found() -> None:
    with opened() as pipe:
        stalls = pd2.data_stalls(Loader(0.020), pipe, batches=8)
    print(stalls)
    # A machine under load sleeps longer than it is asked to.
    assert 0.0195 < stalls.loading < 0.040
    # What the pipeline computes meanwhile is not waited.
    assert stalls.stall == pytest.approx(stalls.loading - stalls.synthetic, abs=0.010)
    assert stalls.share > 0.5
    assert set(stalls.waiting) == {0, 1}
    assert all(share > 0.4 for share in stalls.waiting.values())
    assert stalls.workers_needed >= 2
    assert stalls.with_workers(stalls.workers_needed) == stalls.synthetic
    assert stalls.fetch_stall < stalls.preparation_stall  # no row is slower the first time
    assert "waited for data" in str(stalls)


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (2, False), (2, True)])
@at_most_three_times
def test_fetching_and_preparing_are_told_apart(workers: int, *, persist: bool) -> None:
    """Loading takes 40 ms to fetch a batch and 10 ms to prepare it, a pipeline's batch 10 ms."""
    times = max(1, workers)
    data = Rows(0.010 * times, 0.0025 * times)
    loader = DataLoader(
        data, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persist
    )
    with opened(seconds=0.005) as pipe:
        before = torch.get_rng_state()
        stalls = pd2.data_stalls(loader, pipe, 4)
        assert torch.equal(torch.get_rng_state(), before)
    print(stalls)
    assert not stalls.rereads
    # A machine under load sleeps longer than it is asked to.
    assert 0.045 < stalls.loading < 0.090
    assert 0.009 < stalls.preparing < stalls.loading / 2
    assert 0.045 < stalls.as_is < 0.110
    assert stalls.cached < 0.7 * stalls.as_is
    assert stalls.fetch_stall > 2 * stalls.preparation_stall
    assert stalls.workers_needed >= 2
    assert all(least <= most for least, most in stalls.spread.values())
    assert max(map(len, str(stalls).splitlines())) <= 100


def test_what_a_loader_takes_is_exact_by_a_clock_that_nothing_else_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of an order that is drawn: the same rows come again."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(stalls_module, "time", clock)
    monkeypatch.setitem(globals(), "time", clock)
    loader = DataLoader(Rows(0.010, 0.0025), batch_size=4, shuffle=True)
    for seconds in (0.050, 0.010):
        with stalls_module._repeatable(loader) as stream:
            times, batches = stalls_module._alone(stream, 6)
        assert (times, len(batches)) == (pytest.approx([seconds] * 3), 6)


def test_more_workers_and_caches_are_predicted_from_fetching_and_preparing() -> None:
    found = pd2.DataStalls(
        batches=12,
        synthetic=0.060,
        cached=0.070,
        as_is=0.192,
        preparing=0.064,
        loading=0.192,
        spread=dict.fromkeys(stalls_module._WORDS, (0.0, 1.0)),
        waiting={},
        rereads=False,
    )
    assert (found.stall, found.fetch_stall) == pytest.approx((0.132, 0.122))
    assert found.preparation_stall == pytest.approx(0.010)
    assert [found.with_workers(n) for n in (1, 2, 4)] == pytest.approx([0.192, 0.096, 0.060])
    assert found.workers_needed == 4
    shares = [found.with_workers(1, cached=share) for share in (0, 0.25, 0.5, 1)]
    assert shares == pytest.approx([0.192, 0.160, 0.128, 0.064])
    assert found.with_workers(2, cached=0.5) == pytest.approx(0.064)
    assert "a cache of all rows would give 64.0 ms a batch, of half of them 128.0 ms" in str(found)
    with pytest.raises(ValueError, match=r"cached: 50, it must be a share"):
        found.with_workers(1, cached=50)
    with pytest.raises(ValueError, match=r"factor: 0, it must be > 0 and finite"):
        found.with_workers(0)


@pytest.mark.parametrize("options", [{"generator": torch.Generator()}, {"num_workers": 1}])
def test_a_loader_goes_on_as_if_nothing_had_been_measured(options: dict[str, Any]) -> None:
    data = TensorDataset(torch.randn(48, WIDTH), torch.randn(48, WIDTH))
    sampler = pd2.ResumableSampler(48, 8)

    def read(loader: DataLoader[Any], *, measured_by: pd2.PipelineModule | None) -> torch.Tensor:
        sampler.load_state_dict(sampler.state_dict())
        torch.manual_seed(0)
        options.get("generator", torch.default_generator).manual_seed(0)
        if measured_by:
            pd2.data_stalls(loader, measured_by, 2)
        return torch.cat([x for x, _ in loader])

    with opened() as pipe:
        orders = [{"batch_sampler": sampler}, {"batch_size": 8, "shuffle": True}]
        for order in orders[: 1 if "num_workers" in options else 2]:  # processes take seconds
            loader: DataLoader[Any] = DataLoader(data, **order, **options)
            want = read(loader, measured_by=None)
            assert torch.equal(read(loader, measured_by=pipe), want)


def test_workers_end_with_the_measuring_and_not_when_garbage_is_collected() -> None:
    data = TensorDataset(torch.randn(48, WIDTH), torch.randn(48, WIDTH))
    gc.collect()
    gc.disable()
    try:
        with opened() as pipe:
            pd2.data_stalls(DataLoader(data, batch_size=8, num_workers=1), pipe, 2)
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


@at_most_three_times
def test_what_is_loaded_beside_the_work_is_no_stall() -> None:
    with opened(seconds=0.015) as pipe:  # 30 ms a batch on each stage
        stalls = pd2.data_stalls(Loader(0.010), pipe, batches=5)
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
        with pytest.raises(TypeError, match="what as_call gives: tuple given, it must be a pd2"):
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


@at_most_three_times
def test_the_start_of_an_iteration_is_no_stall() -> None:
    """As of a DataLoader whose workers start anew; this one begins three times in a run."""

    class StartsLate(Loader):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            time.sleep(0.1)
            yield from super().__iter__()

    with opened() as pipe:
        stalls = pd2.data_stalls(StartsLate(0.010, count=5), pipe, 5)
    assert 0.009 < stalls.loading < 0.025
    assert stalls.rereads
    assert "too few batches" in str(stalls)
    assert stalls.stall < 0.022  # 0.02 of each batch are starts


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
