"""Every row once an epoch, and the same batches however often and on what the run goes on."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import pipedream2bw as pd2


def batches_of(count: int, length: int, batch: int, **options: Any) -> list[list[int]]:
    """The first batches, put together from all replicas' parts."""
    width = options.pop("width", len(options.get("num_microbatches", [1])))
    replicas = [
        pd2.ResumableSampler(length, batch, width=width, replica=replica, **options)
        for replica in range(width)
    ]
    streams = [trained(sampler) for sampler in replicas]
    return [joined(next(stream) for stream in streams) for _ in range(count)]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def trained(sampler: pd2.ResumableSampler) -> Iterator[list[int]]:
    while True:
        for rows in sampler:
            sampler.advance()
            yield rows


sizes = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 2**63 - 1), st.booleans())
def test_every_row_comes_once_an_epoch(size: tuple[int, int], seed: int, shuffle: bool) -> None:
    length, batch = size
    batches = batches_of(3 * length, length, batch, seed=seed, shuffle=shuffle)
    assert {len(rows) for rows in batches} == {batch}
    stream = joined(batches)
    for epoch in range(batch):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))
    if not shuffle:
        assert stream[:length] == list(range(length))


@given(sizes, st.integers(0, 100), st.integers(1, 4), st.integers(1, 4))
def test_a_run_goes_on_with_the_same_batches_on_any_number_of_replicas(
    size: tuple[int, int], stopped_after: int, before: int, after: int
) -> None:
    length, batch = size[0] * 12, size[1] * 12
    wanted = batches_of(stopped_after + 10, length, batch)
    assert batches_of(stopped_after + 10, length, batch, width=before) == wanted
    state = pd2.ResumableSampler(length, batch, width=before)
    state.advance(stopped_after)
    parts = []
    for replica in range(after):
        sampler = pd2.ResumableSampler(length, batch, width=after, replica=replica)
        sampler.load_state_dict(state.state_dict())
        stream = trained(sampler)
        parts.append([next(stream) for _ in range(10)])
    assert [joined(rows) for rows in zip(*parts, strict=True)] == wanted[stopped_after:]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 40))
def test_replicas_get_parts_as_large_as_their_numbers_of_microbatches(
    numbers: list[int], rows: int, more: int
) -> None:
    batch = rows * sum(numbers)
    length = batch + more
    wanted = batches_of(5, length, batch)
    assert batches_of(5, length, batch, num_microbatches=numbers) == wanted
    for replica, number in enumerate(numbers):
        sampler = pd2.ResumableSampler(
            length, batch, width=len(numbers), replica=replica, num_microbatches=numbers
        )
        assert {len(part) for part in sampler} == {rows * number}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = batches_of(2, 20, 20)
    assert first != second
    assert batches_of(1, 20, 20, seed=1) != [first]
    assert batches_of(1, 20, 20, seed=1) != [second]  # not that of epoch 1


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetch_ahead_is_not_trained(workers: int) -> None:
    data = TensorDataset(torch.arange(20))
    sampler = pd2.ResumableSampler(20, 4)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    seen = []
    for (rows,) in loader:
        seen.append(rows.tolist())
        sampler.advance()
        if len(seen) == 2:
            break
    again = pd2.ResumableSampler(20, 4)
    again.load_state_dict(sampler.state_dict())
    assert len(again) == 3
    rest = [rows.tolist() for (rows,) in DataLoader(data, batch_sampler=again)]
    assert seen + rest == batches_of(5, 20, 4)


def test_an_iteration_gives_what_is_left_of_the_epoch() -> None:
    sampler = pd2.ResumableSampler(10, 4)
    assert (len(sampler), len(list(sampler))) == (3, 3)
    sampler.advance(3)
    assert (sampler.epoch, sampler.position) == (1, 12)
    assert len(sampler) == len(list(sampler)) == 2


def test_an_epoch_that_was_not_counted_is_not_given_again() -> None:
    sampler = pd2.ResumableSampler(4, 2)
    list(sampler)
    with pytest.raises(RuntimeError, match=r"advance\(\) was not called"):
        iter(sampler)
    sampler.advance(2)
    assert len(list(sampler)) == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_are_no_python_numbers_before_their_batch_comes(shuffle: bool) -> None:
    sampler = pd2.ResumableSampler(100_000, 64, shuffle=shuffle)
    tracemalloc.start()
    try:
        rows = next(iter(sampler))
        _, peak = tracemalloc.get_traced_memory()  # without what torch holds
    finally:
        tracemalloc.stop()
    assert len(rows) == 64
    assert peak < 100_000


def test_states_of_other_rows_are_refused() -> None:
    sampler = pd2.ResumableSampler(10, 2, seed=3)
    for changes, message in (
        ({"length": 11}, "length: 10, in the loaded state: 11"),
        ({"seed": 4}, "seed: 3, in the loaded state: 4"),
        ({"shuffle": False}, "shuffle: True, in the loaded state: False"),
        ({"position": -1}, "position: -1, it must be at least 0"),
        ({"more": 1}, "it must have"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict(sampler.state_dict() | changes)
    assert sampler.position == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, "length: 0, it must be at least 1"),
        ({"length": 8.0}, TypeError, "length: 8.0 given, it must be an int"),
        ({"batch": 11}, ValueError, "batch: 11, it must be at most 10"),
        ({"width": 2, "batch": 5}, ValueError, "batch: 5, width: 2: the batch must be a multiple"),
        (
            {"width": 2, "num_microbatches": [1, 2]},
            ValueError,
            r"batch: 4, num_microbatches: \[1, 2\]: the batch must be a multiple of 3",
        ),
        ({"num_microbatches": [1, 2]}, ValueError, r"num_microbatches: \[1, 2\], width: 1"),
        ({"num_microbatches": [0]}, ValueError, r"num_microbatches\[0\]: 0, it must be at least"),
        ({"num_microbatches": [1.5]}, TypeError, r"num_microbatches\[0\]: 1.5 given"),
        ({"width": 2, "replica": 2}, ValueError, "replica: 2, it must be at most 1"),
        ({"seed": -1}, ValueError, "seed: -1, it must be at least 0"),
        ({"shuffle": 1}, TypeError, "shuffle: 1 given, it must be a bool"),
    ],
)
def test_arguments_are_checked(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pd2.ResumableSampler(**{"length": 10, "batch": 4, **arguments})
