"""Ok-Topk against its definition on dense tensors, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pipedream2bw as pd2
from pipedream2bw.extras import ok_topk
from tests.distributed.test_replica_sums import bytes_written
from tests.runs.launch import RankResult, in_turn, run_ranks

WORLD, NUMEL, BATCHES = 4, 40_000, 9
SMALL, DENSITY = 4_000, 0.05
PERIODS = {"threshold_period": 4, "region_period": 3}


class Bucket:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]


def gradients() -> list[torch.Tensor]:
    """By batch, of all replicas: a part of them is large, and moves; some are zero."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for batch in range(BATCHES):
        of_all = torch.randn(WORLD, NUMEL, generator=generator)
        large = slice(batch * NUMEL // 10, (batch + 2) * NUMEL // 10)
        of_all[:, large] *= 3
        of_all[batch % WORLD, : NUMEL // 4] = 0
        of_all[:, -1] = -0.0
        batches.append(of_all * (10 if batch == 6 else 1))  # thresholds of batch 4 select too many
    return batches


def definition(
    batches: list[torch.Tensor], k: int, most_sums: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """By batch: the mean, what each replica keeps, and whether the sums' threshold is found."""
    residual = torch.zeros(WORLD, NUMEL)
    own, common = torch.zeros(WORLD), torch.zeros(())
    for batch, of_all in enumerate(batches):
        pending = residual + of_all / WORLD
        renews = batch % PERIODS["threshold_period"] == 0
        chosen = torch.empty_like(pending, dtype=torch.bool)
        for replica, mine in enumerate(pending):
            large = (mine.abs() >= own[replica]) & (mine != 0)
            if renews or large.sum() > 2 * k:
                own[replica] = mine.abs().sort(descending=True).values[k - 1]
            chosen[replica] = (mine.abs() >= own[replica]) & (mine != 0)
            if chosen[replica].sum() > k:
                chosen[replica] &= mine.abs() >= mine.abs().sort(descending=True).values[k - 1]
        sums = torch.zeros(NUMEL)
        for replica in range(WORLD):
            sums += torch.where(chosen[replica], pending[replica], 0)
        used = chosen.any(0) & (sums.abs() >= common) & (sums != 0)
        finds = renews or bool(used.sum() > most_sums)
        if finds:
            common = sums[chosen.any(0)].abs().sort(descending=True).values[k - 1]
            used = chosen.any(0) & (sums.abs() >= common) & (sums != 0)
        residual = torch.where(chosen & used, 0, pending)
        yield torch.where(used, sums, 0), residual, finds


def averaged(state: pd2.OkTopkState, mine: torch.Tensor) -> torch.Tensor:
    bucket: Any = Bucket(mine.clone())
    return pd2.ok_topk_hook(state, bucket).wait()


def sparse(rank: int, world: int, balances: bool) -> dict[str, Any]:
    """What agrees with the definition, by batch; bytes, as counted and written; of a steady batch.

    In that one as much is selected as when its thresholds were made.
    """
    torch.set_num_threads(1)
    if balances:
        ok_topk.MOST_IMBALANCE = 1  # of four ranks none has more than four times the mean
    batches, density = gradients(), 0.02
    k = round(density * NUMEL)
    group = dist.group.WORLD
    assert group is not None
    state = pd2.OkTopkState(group, density, **PERIODS)
    equals, counted, written, found = [], [], [], []
    defined = definition(batches, k, k if balances else 2 * k)
    for of_all, (mean, residual, finds) in zip(batches, defined, strict=True):
        dist.barrier()
        before = state.bytes_sent, bytes_written()
        got = averaged(state, of_all[rank])
        counted.append(state.bytes_sent - before[0])
        written.append(bytes_written() - before[1])
        found.append(finds)
        equals.append(torch.equal(got, mean) and torch.equal(state.residual(0), residual[rank]))
    state = pd2.OkTopkState(group, density)
    first = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    most = NUMEL * 3 // 4  # of which the sums are 0: all others are one rank's
    first[:most] = torch.randn(most, generator=torch.Generator().manual_seed(world)) * (-1) ** rank
    pending = first / WORLD
    averaged(state, first)
    before_it = state.bytes_sent
    averaged(state, WORLD * (pending - state.residual(0)))
    steady = state.bytes_sent - before_it
    return {
        "equals": equals,
        "counted": counted,
        "written": written,
        "found": found,
        "steady": steady,
    }


def dense(rank: int, world: int) -> list[bool]:
    """Whether with k = n the mean has the bits of the sum in the replicas' order."""
    group = dist.group.WORLD
    assert group is not None
    state = pd2.OkTopkState(group, density=1, **PERIODS)
    equals = []
    for of_all in gradients()[:6]:
        first, *others = of_all / WORLD
        for other in others:
            first = first + other
        got = averaged(state, of_all[rank])
        equals.append(torch.equal(got.view(torch.int32), first.view(torch.int32)))
    return equals


def bad_and_odd(rank: int, world: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match=r"density: 1.5, it must be at most 1"):
        pd2.OkTopkState(group, 1.5)
    state = pd2.OkTopkState(group, 0.1)
    nothing = averaged(state, torch.zeros(50))  # as where a model's last layer is zero
    not_a_number = torch.ones(50)
    not_a_number[7] = torch.nan if rank == 1 else 1
    wrong = averaged(state, not_a_number)
    model = nn.Linear(3, 2)
    replicated = DistributedDataParallel(model)
    replicated.register_comm_hook(pd2.OkTopkState(group, 1), pd2.ok_topk_hook)
    replicated(torch.full((1, 3), float(rank))).sum().backward()
    assert model.weight.grad is not None
    return [
        bool((nothing == 0).all()),
        bool(wrong[7].isnan()),  # shows, as it does in a sum
        torch.equal(model.weight.grad, torch.full((2, 3), 1.5)),
    ]


def volumes(rank: int, world: int) -> dict[tuple[str, int], tuple[list[float], float]]:
    """Words that this replica sends, by batch, and the gradients that got lost, as a share.

    Residuals grow for the first 1 / density batches and more: kept thresholds select too much.
    """
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(rank)
    drawn = {
        "gaussian": lambda: torch.randn(SMALL, generator=generator),
        "heavy-tailed": lambda: torch.empty(SMALL).cauchy_(generator=generator),
        "tied": lambda: torch.randint(-2, 3, (SMALL,), generator=generator).float(),
    }
    found = {}
    for name, ok_topk.MOST_IMBALANCE in (*zip(drawn, (4, 4, 4), strict=True), ("gaussian", 1)):
        state = pd2.OkTopkState(group, DENSITY, region_period=30)
        words, given, got = [], torch.zeros(SMALL), torch.zeros(SMALL)
        for _ in range(45):
            before, mine = state.bytes_sent, drawn[name]()
            given += mine / world
            got += averaged(state, mine)
            words.append((state.bytes_sent - before) / 4)
        missing = given - state.residual(0)
        dist.all_reduce(missing)
        lost = float((missing - got).norm() / got.norm())
        found[name, ok_topk.MOST_IMBALANCE] = words, lost
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ok_topk_sends_no_more_than_the_papers_bound_in_any_batch(world: int) -> None:
    values = [result.value for result in run_ranks(volumes, world, timeout=100)]
    for case in values[0]:
        means = [sum(each) / world for each in zip(*(v[case][0] for v in values), strict=True)]
        counts = 7 * world + (300 if case[1] == 1 else 0)
        assert max(means) <= 6 * SMALL * DENSITY * (world - 1) / world + counts, case
        assert values[0][case][1] < 1e-4, case


@pytest.fixture(scope="module")
def results() -> list[RankResult]:
    return run_ranks(all_of_it, WORLD, timeout=100)


def all_of_it(rank: int, world: int) -> list[Any]:
    first, others = sparse(rank, world, False), in_turn(rank, world, dense, bad_and_odd)
    return [first, sparse(rank, world, True), *others]


@pytest.mark.parametrize("balances", [False, True])
def test_ok_topk_is_its_definition(results: list[RankResult], *, balances: bool) -> None:
    for result in results:
        assert result.value[balances]["equals"] == [True] * BATCHES


def test_ok_topk_of_all_gradients_has_the_bits_of_an_ordered_sum(
    results: list[RankResult],
) -> None:
    for result in results:
        assert result.value[2] == [True] * 6


def test_ok_topk_hides_no_nan_and_goes_with_ddp(results: list[RankResult]) -> None:
    for result in results:
        assert result.value[3] == [True] * 3


@pytest.mark.parametrize("balances", [False, True])
def test_ok_topk_counts_what_it_sends(results: list[RankResult], *, balances: bool) -> None:
    for result in results:
        each = result.value[balances]
        batches = zip(each["counted"], each["written"], each["found"], strict=True)
        for counted, written, found in batches:
            headers = 30_000 if found else 10_000  # of many small messages
            assert counted <= written <= 1.1 * counted + headers


def test_regions_follow_what_is_large(results: list[RankResult]) -> None:
    """Whoever has the region of all that is large would send most (up to three times the mean)."""
    for batch in range(PERIODS["region_period"], BATCHES, PERIODS["region_period"]):
        sent = [result.value[False]["counted"][batch] for result in results]
        assert max(sent) < 1.2 * sum(sent) / WORLD


@pytest.mark.parametrize(("balances", "least", "most"), [(False, 3.8, 4.1), (True, 4.3, 6)])
def test_ok_topk_sends_the_papers_share(
    results: list[RankResult], *, balances: bool, least: float, most: float
) -> None:
    """Words (section 3.1): 2k (w - 1) / w each to add up, to share out, and to give back."""
    mean = sum(result.value[balances]["steady"] for result in results) / WORLD
    words = mean / 4 / (0.02 * NUMEL * (WORLD - 1) / WORLD)
    assert least < words < most
