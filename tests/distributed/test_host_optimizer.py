"""The optimizer in the host's memory under processes: sums of replicas and of tied weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.measuring.delays import delays_everywhere
from pipedream2bw.pipeline import module
from pipedream2bw.runtime import local_stages
from tests.distributed import test_precision, test_tied
from tests.runs.launch import run_ranks


def leave_optimizers_to_the_host() -> None:
    """In this process, with buckets so small that every parameter is one."""
    open_session = module.open_session

    def opened(model: Any, loss_fn: Any, options: Any, arrange: Any) -> Any:
        options = dataclasses.replace(options, optimizer_device="cpu", bucket_cap_mb=1e-4)
        return open_session(model, loss_fn, options, arrange)

    module.open_session = opened
    local_stages.is_apart_from_host = lambda device: True


def masters(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    leave_optimizers_to_the_host()
    for schedule in ("2bw", "1f1b"):
        for precision in ("bf16", "fp16"):
            test_precision.check(width, schedule, precision)
    test_precision.check(width, "2bw", "bf16", split_master=True)
    with delays_everywhere(0.02):
        test_precision.check(width, "2bw", "bf16")


@pytest.mark.parametrize(("world", "width"), [(2, 2), (4, 2)])
def test_masters_of_replicas_are_the_definitions(world: int, width: int) -> None:
    run_ranks(masters, world, args=(width,), timeout=180.0)


def ties(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    leave_optimizers_to_the_host()
    test_tied.check("language model", "2bw", 4, width=1)
    test_tied.check("language model", "chimera", 4, width=1, bound=0.1)
    test_tied.check("language model", "1f1b", 4, width=1, bound=0.1)


def test_tied_gradients_of_processes_are_summed() -> None:
    run_ranks(ties, 2, timeout=120.0)
