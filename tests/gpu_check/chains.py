"""Three and four processes that share the device, with messages in memory that two have open."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.runs.trajectory import Trajectory, by_oracle, delays_under_pipedream
from tests.samples.models import TASKS, Task

from .device import Device, open_device, unordered_accesses
from .ranks import on_ranks, patience, together
from .ring import counted_rings, judge_ranks, judge_rings
from .section import Pace, Rows
from .training import by_processes, repeatable, sgd, task_on

TIMEOUT = 12.0  # of one pipeline
WIDE_ON_A_GPU, WIDE_ELSEWHERE = 1024, 32
"""Of a layer; a microbatch of four times as many rows is 16 MiB on a GPU."""
LARGE_BATCHES = 10


@dataclasses.dataclass(frozen=True)
class Chain:
    """A training whose stages are in processes. ``rows``: of each batch's microbatches."""

    task: str = "mlp"
    schedule: str = "2bw"
    num_microbatches: int = 4
    stages_per_rank: int = 1
    graphs: bool = False
    rows: tuple[int, ...] = (2,) * 5

    def batches(self, task: Task) -> list[Batch]:
        return task.batches([rows * self.num_microbatches for rows in self.rows])

    def depth(self, num_ranks: int) -> int:
        return num_ranks * self.stages_per_rank


CHAINS = {
    "1f1b": Chain(schedule="1f1b"),
    "2bw": Chain(),
    "pipedream": Chain(schedule="pipedream", num_microbatches=1),
    "a skip": Chain("skips"),
    "two rings between two processes": Chain(
        schedule="2bw_v", num_microbatches=8, stages_per_rank=2
    ),
    "graphs": Chain(graphs=True, rows=(2,) * 12),
    "messages that grow": Chain("wide"),
}
OF_FOUR = ("1f1b", "2bw", "pipedream", "a skip")


def run(device: Device, rows: Rows) -> None:
    if not device.has_kernels:
        rows.absent("shared memory", "the package is built without")
        return
    asked = {3: tuple(CHAINS), 4: OF_FOUR if device.is_gpu else OF_FOUR[1:2]}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        started = [
            functools.partial(start, device, rows, num_ranks, names, folder)
            for num_ranks, names in asked.items()
        ]
        together(device, started)
        pace = Pace(rows)
        for num_ranks, names in asked.items():
            for name in names:
                what = f"{num_ranks} processes, {name}"
                if pace.has_time(what):
                    with rows.guarded(what):
                        judge(device, rows, num_ranks, name, Path(folder))


def start(device: Device, rows: Rows, num_ranks: int, names: tuple[str, ...], folder: str) -> None:
    what = f"{num_ranks} processes"
    with rows.guarded(what):
        on_ranks(
            device,
            rows,
            what,
            one_rank,
            num_ranks,
            names,
            folder,
            seconds=patience(rows),
            rank_environment=True,
        )


def judge(device: Device, rows: Rows, num_ranks: int, name: str, folder: Path) -> None:
    """Compares what the ranks have written with the definition."""
    what, chain = f"{num_ranks} processes, {name}", chain_on(device, name)
    paths = [path_of(folder, name, num_ranks, rank) for rank in range(num_ranks)]
    if not all(path.exists() for path in paths):
        rows.check(what, False, "it was not done")
        return
    told: list[dict[str, Any]] = [torch.load(path, weights_only=False) for path in paths]
    if not judge_ranks(rows, what, told, definition(device, chain, num_ranks).on_host()):
        return
    judge_rings(rows, f"{what}: channels in shared memory", told)
    if chain.graphs:
        recorded = [each["recorded"] for each in told]
        rows.check(f"{what}: forwards, backwards as graphs", all(map(all, recorded)), f"{recorded}")
    if name == "messages that grow":
        over = max((each["peak"] + each["messages"]) / each["report"] for each in told)
        rows.figure(f"{what}: peak and messages / report", over, detail=f"{told[0]['bytes']}")


def definition(device: Device, chain: Chain, num_ranks: int) -> Trajectory:
    """The unsplit model on the device, by stock torch."""
    with repeatable():
        task = task_of(device, chain.task)
        batches = chain.batches(task)
        delays = None
        if chain.schedule == "pipedream":
            delays = delays_under_pipedream(task, chain.depth(num_ranks), batches[0])
        schedule = "2bw" if chain.schedule.startswith("2bw") else chain.schedule
        m = chain.num_microbatches
        return by_oracle(task, batches, m, sgd, schedule=schedule, delay_of=delays)


def chain_on(device: Device, name: str) -> Chain:
    """The messages that grow: slots are made anew twice, and then used in ten batches."""
    chain = CHAINS[name]
    if chain.task != "wide":
        return chain
    most = 4 * wide(device)
    return dataclasses.replace(chain, rows=(most // 64, most // 4) + (most,) * LARGE_BATCHES)


def wide(device: Device) -> int:
    return WIDE_ON_A_GPU if device.is_gpu else WIDE_ELSEWHERE


def task_of(device: Device, name: str) -> Task:
    if name != "wide":
        return task_on(TASKS[name], device)
    width = wide(device)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))

    @functools.cache  # to draw so many numbers takes longer than to train with them
    def draw(rows: int) -> Batch:
        return Batch((torch.randn(rows, width),), torch.randn(rows, width))

    return task_on(Task(build, draw), device)


def one_rank(
    rank: int, world_size: int, device_type: str, names: tuple[str, ...], folder: str
) -> None:
    device = open_device(device_type)
    assert dist.get_backend() == "gloo"
    for name in names:
        try:
            told = train(device, chain_on(device, name), world_size)
        except Exception as error:  # the next one is trained all the same
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        path = path_of(Path(folder), name, world_size, rank)
        torch.save(told, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
    races = unordered_accesses(device)
    assert not races, races[:3]


def path_of(folder: Path, name: str, num_ranks: int, rank: int) -> Path:
    return folder / f"{name} {num_ranks} {rank}.pt"


def train(device: Device, chain: Chain, num_ranks: int) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def look(pipe: pd2.PipelineModule) -> None:
        graphs, memory = pipe.graph_report().values(), pipe.memory_report().values()
        device.synchronize()
        told["recorded"] = [(each.forwards, each.backwards) for each in graphs]
        told["peak"] = torch.accelerator.max_memory_allocated() - before
        told["messages"] = sum(each.message_buffers for each in memory)
        told["report"] = sum(each.total for each in memory)
        told["bytes"] = f"{told['peak']:,} and {told['messages']:,} of {told['report']:,}"

    with counted_rings() as rings, repeatable():
        task = task_of(device, chain.task)
        batches = chain.batches(task)
        device.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        trained = by_processes(
            device,
            task,
            batches,
            num_stages=chain.depth(num_ranks),
            num_microbatches=chain.num_microbatches,
            timeout=TIMEOUT,
            look=look,
            schedule=chain.schedule,
            stages_per_rank=chain.stages_per_rank,
            graphs=chain.graphs,
        ).on_host()
    return {"losses": trained.losses, "state": trained.state, "rings": rings, **told}
