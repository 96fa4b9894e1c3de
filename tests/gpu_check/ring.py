"""Two stages in two processes that share the device, by memory of the device or of the hosts."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from pipedream2bw.ranks import channels
from pipedream2bw.ranks.rings import DeviceRing, make_device_ring
from tests.runs.trajectory import Trajectory, by_oracle
from tests.samples.models import TASKS

from .device import Device, open_device, unordered_accesses
from .ranks import on_ranks, patience
from .section import Rows
from .training import by_processes, distance, repeatable, sgd, task_on

M, BATCHES = 4, 6
RUNS = 4
"""Each closes its pipeline at once: what its device has still to do then may come out otherwise."""
WITHIN = 1e-6
TIMEOUT = 9.0  # of one pipeline
SHARED, STAGED = "the device's shared memory", "staged in the hosts' memory"
"""How messages travel; the first is what processes get that can open each other's memory."""


def run(device: Device, rows: Rows) -> None:
    with repeatable():
        task = task_on(TASKS["mlp"], device)
        want = by_oracle(task, task.batches([2 * M] * BATCHES), M, sgd).on_host()
    ways = (SHARED, STAGED) if device.has_kernels else (STAGED,)
    if not device.has_kernels:
        rows.absent(SHARED, "the package is built without")
    results = on_ranks(
        device,
        rows,
        "two processes",
        one_rank,
        2,
        ways,
        seconds=patience(rows),
        rank_environment=True,
    )
    for way in ways if results is not None else ():
        assert results is not None
        runs = list(zip(*(each.value[way] for each in results), strict=True))
        if judge_ranks(rows, f"{way}: as the unsplit model", runs[0], want):
            judge_rings(rows, f"{way}: such channels", runs[0], shared=way == SHARED)
        for number, told in enumerate(runs[1:], 2):
            judge_ranks(rows, f"{way}: the same, run {number}", told, want)


def judge_ranks(rows: Rows, name: str, told: Sequence[Mapping[str, Any]], want: Trajectory) -> bool:
    """Compares what ranks have trained together with the definition, or says why they did not.

    Args:
        told: of each rank, "losses" and its "state", or an "error".
    """
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
    if errors:
        rows.check(name, False, "\n".join(errors))
        return False
    state = {key: value for each in told for key, value in each["state"].items()}
    apart = distance(Trajectory(told[-1]["losses"], state), want)
    rows.check(name, apart <= WITHIN, f"{apart:.1e}")
    return True


def judge_rings(
    rows: Rows, name: str, told: Sequence[Mapping[str, Any]], *, shared: bool = True
) -> None:
    """Whether all channels of each rank ("rings") are in shared memory, or none is."""
    rings = [each["rings"] for each in told]
    is_so = all(each and all(each) for each in rings) if shared else not any(map(any, rings))
    rows.check(name, is_so, f"{rings}")


def one_rank(
    rank: int, world_size: int, device_type: str, ways: tuple[str, ...]
) -> dict[str, list[dict[str, Any]]]:
    device = open_device(device_type)
    assert dist.get_backend() == "gloo"
    told = {way: [_told(device, way) for _ in range(RUNS)] for way in ways}
    races = unordered_accesses(device)
    assert not races, races[:3]
    return told


def _told(device: Device, way: str) -> dict[str, Any]:
    try:
        with counted_rings(allowed=way == SHARED) as rings, repeatable():
            task = task_on(TASKS["mlp"], device)
            batches = task.batches([2 * M] * BATCHES)
            trained = by_processes(
                device, task, batches, num_stages=2, num_microbatches=M, timeout=TIMEOUT
            ).on_host()
    except Exception as error:  # the other way is tried all the same
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"losses": trained.losses, "state": trained.state, "rings": rings}


@contextlib.contextmanager
def counted_rings(*, allowed: bool = True) -> Iterator[list[bool]]:
    """Gives a list of whether each channel that was asked for in shared memory was made."""
    rings: list[bool] = []

    def make(*args: Any) -> DeviceRing | None:
        ring = make_device_ring(*args) if allowed else None
        rings.append(ring is not None)
        return ring

    with mock.patch.object(channels, "make_device_ring", make):
        yield rings
