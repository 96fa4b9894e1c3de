"""Any options together in processes, with replicas and with messages that come late."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.runs.combinations import (
    Combination,
    assert_alike,
    batches_of,
    by_definition,
    by_pipeline,
    draw,
)
from tests.runs.launch import run_ranks

SEEDS = range(8)
FEWER, OTHERS = SEEDS[:4], SEEDS[4:]


def unequal(of: Combination, width: int, numbers: random.Random) -> tuple[int, ...]:
    """Of microbatches, that the schedule has."""
    allowed, sizes = [], of.sizes
    for m in range(1, sizes.num_microbatches + 5):
        with contextlib.suppress(ValueError):
            pd2.make_schedule(of.schedule, sizes.num_stages, m, sizes.stages_per_rank)
            allowed.append(m)
    return tuple(numbers.choices(allowed, k=width))


def train(rank: int, world: int, width: int, is_one_batch: bool, seeds: range) -> None:
    torch.set_num_threads(1)
    num_ranks = world // width
    for seed in seeds:
        numbers = random.Random(1000 * world + 100 * width + 50 * is_one_batch + seed)
        of = draw(numbers.choice, num_ranks)
        if is_one_batch:
            of = dataclasses.replace(of, numbers=unequal(of, width, numbers))
            if of.is_fresh and max(of.late) > min(of.numbers):
                of = dataclasses.replace(of, update_slots=1)
        by_replica = [batches_of(of, 10 + replica, replica) for replica in range(width)]
        own = rank // num_ranks
        want = by_definition(of, by_replica)[own]
        options: dict[str, Any] = {"bucket_cap_mb": numbers.choice([25.0, 1e-6])}
        # The sum of two has one order.
        options["replica_sums"] = numbers.choice(["ordered", *["all_reduce"][: 3 - width]])
        options["shard_state"] = of.can_shard and seed % 3 != 1
        if width == 2 and seed % 3 == 1 and of.can_hook:
            options["hook"] = allreduce_hook
        late = delays_everywhere(0.02) if seed % 3 == 0 else contextlib.nullcontext()
        try:
            with late:
                got = by_pipeline(of, by_replica[own], width=width, **options)
            assert_alike(of, got, want)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {of}") from error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "width", "is_one_batch", "seeds"),
    [
        *((2, 2, False, SEEDS), (4, 2, False, FEWER), (4, 2, True, FEWER)),
        *exhaustive((4, 2, False, OTHERS), (4, 2, True, OTHERS)),
        *exhaustive((2, 1, False, SEEDS), (4, 1, False, SEEDS), (4, 4, False, SEEDS)),
    ],
)
def test_any_options_together_in_processes(
    world: int, width: int, is_one_batch: bool, seeds: range
) -> None:
    run_ranks(train, world, args=(width, is_one_batch, seeds), timeout=170)
