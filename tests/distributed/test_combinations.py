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
from tests.samples.schedule_sizes import Sizes

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
        *((2, 2, False, FEWER), (4, 2, True, FEWER)),
        *exhaustive(
            (4, 2, False, FEWER), (2, 2, False, OTHERS), (4, 2, False, OTHERS), (4, 2, True, OTHERS)
        ),
        *exhaustive((2, 1, False, SEEDS), (4, 1, False, SEEDS), (4, 4, False, SEEDS)),
    ],
)
def test_any_options_together_in_processes(
    world: int, width: int, is_one_batch: bool, seeds: range
) -> None:
    run_ranks(train, world, args=(width, is_one_batch, seeds), timeout=170)


FOUND = Combination(
    schedule="2bw_v_half",
    sizes=Sizes(num_stages=2, num_microbatches=1, stages_per_rank=2),
    cuts=("blocks.2",),
    lengths=(1, 1, 1, 1, 1),
    rows=(2, 2, 3, 2, 2),
    averages=True,
    reduction="mean",
    precision=None,
    split_master=False,
    narrow=False,
    autocast=False,
    scaled=False,
    overflows=frozenset(),
    clip="",
    norm_type=2.0,
    optimizer="several",
    staleness="",
    warmup=0,
    recompute=False,
    tied=True,
    frozen=frozenset(),
    norm="none",
    gated=False,
    adds=False,
    between=("", "", "state_dict", "reload the optimizer", "state_dict"),
    load_before=-1,
)


def train_found(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    by_replica = [batches_of(FOUND, 10 + replica, replica) for replica in range(2)]
    want = by_definition(FOUND, by_replica)[rank]
    got = by_pipeline(FOUND, by_replica[rank], width=2, shard_state=True)
    assert_alike(FOUND, got, want)


@pytest.mark.slow
def test_tied_copies_of_one_process_keep_the_state_that_each_replica_steps() -> None:
    """Both stages are of one process, and each replica steps one of the two copies."""
    run_ranks(train_found, 2, timeout=60)
