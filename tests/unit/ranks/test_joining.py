"""Processes that are started again find each other in a store full of what others left."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pipedream2bw.ranks.joining import store_of_this_life

WORLD = 3


def lives_in(store: Any, order: list[int], world: int = WORLD, seconds: float = 20.0) -> list[Any]:
    """What each rank gets, or the error that it raises; they come in this order."""
    found: list[Any] = [None] * world

    def join(rank: int) -> None:
        try:
            found[rank] = store_of_this_life(store, rank, world, seconds)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    for thread in threads:
        thread.join()
    return found


def make_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_every_life_has_a_part_of_its_own_that_all_its_ranks_use(order: list[int]) -> None:
    store = make_store()
    for life in range(3):
        ranks = lives_in(store, order)
        assert not any(each.check(["address"]) for each in ranks)
        ranks[life].set("address", f"of life {life}")
        assert [each.get("address").decode() for each in ranks] == [f"of life {life}"] * WORLD


def test_another_number_of_ranks_finds_each_other_too() -> None:
    store = make_store()
    for world in (3, 2, 4):
        ranks = lives_in(store, list(range(world))[::-1], world=world)
        ranks[0].set("size", str(world))
        assert [each.get("size").decode() for each in ranks] == [str(world)] * world


def test_a_rank_that_does_not_come_is_an_error_although_an_earlier_one_had() -> None:
    store = make_store()
    lives_in(store, [0, 1, 2])
    for missing, at_fault in ((2, "rank 2"), (0, "rank 0")):
        others = [rank for rank in range(WORLD) if rank != missing]
        error = lives_in(store, others, seconds=0.5)[0 if missing else 2]
        assert str(error) == f"{at_fault} did not come within 0.5 s"
