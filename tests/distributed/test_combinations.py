"""Any options together in processes, with replicas and with messages that come late."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from benchmarks.measuring.delays import delays_everywhere
from tests.runs.combinations import assert_alike, batches_of, by_definition, by_pipeline, draw
from tests.runs.launch import run_ranks

NUM_COMBINATIONS = 12


def train(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    num_ranks = world // width
    for seed in range(NUM_COMBINATIONS):
        numbers = random.Random(1000 * world + 100 * width + seed)
        of = draw(numbers.choice, num_ranks)
        by_replica = [batches_of(of, seed=10 + replica) for replica in range(width)]
        own = rank // num_ranks
        want = by_definition(of, by_replica)[own]
        bucket_cap_mb = numbers.choice([25.0, 1e-6])
        options = {"bucket_cap_mb": bucket_cap_mb, "shard_state": of.can_shard and seed % 3 != 1}
        late = delays_everywhere(0.02) if seed % 3 == 0 else contextlib.nullcontext()
        try:
            with late:
                got = by_pipeline(of, by_replica[own], width=width, **options)
            assert_alike(of, got, want, width=width)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {of}") from error


@pytest.mark.slow
@pytest.mark.parametrize(("world", "width"), [(2, 1), (2, 2), (4, 2)])
def test_any_options_together_in_processes(world: int, width: int) -> None:
    run_ranks(train, world, args=(width,), timeout=170)
