"""Runs a function in fresh processes, one for each rank, on one thread each."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(minutes=30)
_PRELOADED = ("torch", "torch.distributed.pipelining", "pipedream2bw")


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` on every rank and returns what they returned.

    Several ranks have a gloo process group; its store lives here, as torchrun's does in its agent,
    on a port that the system chooses. A single rank has none. A rank that raises ends all of them
    and raises here, with its traceback.
    """
    # Ranks are forked from a server that has loaded torch and done nothing else: loading takes
    # seconds, and torch's threads would not survive a fork. A smoke run has none of these yet, and
    # would take longer to start a server than for all the rest.
    if "--smoke" in sys.argv:
        return _run_on("fork", world_size, function, args)
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    return _run_on("forkserver", world_size, function, args)


def run_on_fresh_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function`` as :func:`run_on_ranks`, in processes that import the main module anew.

    They begin as ``python`` does; nothing is loaded before.
    """
    return _run_on("spawn", world_size, function, args)


def run_with_store(method: str, count: int, function: Callable[..., Any], *args: Any) -> None:
    """Calls ``function(index, store, *args)`` in ``count`` processes; the store lives here.

    ``method`` is how ``multiprocessing`` starts them. The store's thread works while a process
    joins, and a process forked meanwhile would inherit locks that nobody releases: the C library's
    for host names. So the processes join once all of them have started.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a process loads torch
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    all_started = multiprocessing.get_context(method).Event()
    processes = mp.start_processes(
        _join_store,
        args=(store.port, all_started, function, args),
        nprocs=count,
        join=False,
        daemon=True,
        start_method=method,
    )
    all_started.set()
    while not processes.join():
        pass


def _join_store(
    index: int, port: int, all_started: Event, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    all_started.wait()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    function(index, store, *args)


def _run_on(
    method: str, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_with_store(method, world_size, _run_rank, world_size, folder, function, args)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def seconds_of_process() -> float:
    """How long this process has been there. On Linux alone."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # see proc(5): the 22nd field of all
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def last_ranks_value(value: int) -> int:
    """``value`` as the last rank, which has the losses, gave it. Every rank calls it."""
    held = torch.tensor(value)
    dist.broadcast(held, src=dist.get_world_size() - 1)
    return int(held)


def known_to_all(values: list[float]) -> list[float]:
    """The list of the one rank whose list is not empty. Every rank calls it."""
    lists: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, values)
    (found,) = (each for each in lists if each)
    return found


def _run_rank(
    rank: int,
    store: dist.Store,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if world_size > len(cores):  # ranks that move between cores disturb each other
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
    value = function(rank, world_size, *args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(value))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
