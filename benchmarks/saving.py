"""What saving a checkpoint costs a run that goes on training meanwhile.

A model of 4.7 million parameters (AdamW, float32; 16 bytes a parameter are saved) in two stages,
one process each, on 8,192 tokens a batch: two fifths of the tokens a parameter of GPT-2's batches.
Processes and cores are as many, so that nothing of a save is for free. Blocks of batches take turns
in one run: without saving; with saves every ten batches into memory (/dev/shm); with
torch.distributed.checkpoint's async_save of the same newest weights and moments after a drain, as
often. Then ``every="auto"`` on a disk of 20 MB/s (writes wait as long as such a disk would), in
turns with blocks without saving. Then the time from building a pipeline to its first batch, with
and without resuming.

    python benchmarks/saving.py [--rounds 8] [--smoke] [--json PATH]
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring.ranks import run_on_ranks
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import Workload
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import Folder

NUM_STAGES = 2
NUM_MICROBATCHES = 4
WORKLOAD = Workload("transformer", rows=16, hidden=256, layers=3, sequence=128)
SMOKE_WORKLOAD = Workload("transformer", rows=1, hidden=32, layers=1, sequence=8)
EVERY = 10
BLOCK = 30
WAYS = ("none", "saving", "dcp")
DISK_BYTES_PER_SECOND = 20e6


def make(workload: Workload, x: torch.Tensor) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    pipe = pd2.PipelineModule(
        [workload.stage(index) for index in range(NUM_STAGES)],
        nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        example_args=(x[: workload.rows],),
        timeout=120.0,
    )
    return pipe, pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-4))


class Training:
    """Trains blocks of batches, and gives the time of each batch."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.x, self.target = workload.batch(NUM_MICROBATCHES)
        self.pipe, self.opt = make(workload, self.x)
        self.folder = folder
        self.saver = pd2.Checkpointer(folder / "ours", self.pipe, self.opt, every=EVERY, keep=2)
        self.losses: list[Any] = []
        self.dcp: Any = None
        self.updates = 0

    def batch(self) -> None:
        if len(self.losses) >= 2:
            float(self.losses.pop(0))
        self.losses.append(self.pipe.train_step(self.x, target=self.target))
        self.opt.step()
        self.updates += 1

    def block(self, way: str, batches: int) -> list[float]:
        times = []
        self.losses.clear()
        for _ in range(3):  # until the pipeline is full
            self.batch()
        while self.updates % EVERY != EVERY - 1:  # so that the saves' ends are within the block
            self.batch()
        dist.barrier()
        last = time.perf_counter()
        for number in range(batches):
            self.batch()
            if way == "saving":
                self.saver.step()
            if way == "dcp" and number % EVERY == 0:
                self.save_by_dcp(number)
            now = time.perf_counter()
            times.append(now - last)
            last = now
        for saving in self.saver.under_way:
            saving.done.result()
        times[-1] += time.perf_counter() - last
        if self.dcp is not None:
            self.dcp.result()
            self.dcp = None
        return times

    def save_by_dcp(self, number: int) -> None:
        if self.dcp is not None:
            self.dcp.result()
        self.pipe.flush()
        state = {"model": self.pipe.state_dict(), "optimizer": {}}
        self.opt.state_dict()
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        for parameter, of_one in self.opt.state.items():
            for key, value in of_one.items():
                state["optimizer"][f"{names[id(parameter)]}.{key}"] = value
        path = self.folder / "dcp" / str(number % 2)
        self.dcp = dcp.async_save(state, checkpoint_id=str(path))


@contextlib.contextmanager
def slow_disk() -> Iterator[None]:
    """Makes every write to a checkpoint take as long as on a disk of so many bytes a second."""
    writing = Folder.writing

    @contextlib.contextmanager
    def slowly(self: Folder, *names: str) -> Iterator[IO[bytes]]:
        with writing(self, *names) as file:
            begin, at = time.monotonic(), file.tell()
            write = file.write

            class Slow:
                def write(self, data: Any) -> int:
                    nonlocal at
                    at += len(data)
                    left = begin + at / DISK_BYTES_PER_SECOND - time.monotonic()
                    time.sleep(max(0.0, left))
                    return write(data)

            yield Slow()  # type: ignore[misc]

    Folder.writing = slowly  # type: ignore[method-assign]
    yield
    Folder.writing = writing  # type: ignore[method-assign]


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, block: int, folder: Path
) -> dict[str, Any]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    training = Training(workload, folder)
    training.block("none", 5)
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            times[way].append(training.block(way, block))
    idle = {way: idle_share(training, way, block) for way in ("none", "saving")}
    training.pipe.flush()
    saved = sum(p.numel() for p in training.pipe.parameters()) * 16
    training.saver.close()
    auto = save_automatically(training, block, folder, rounds)
    training.pipe.close()
    return {
        "times": times,
        "idle": idle,
        "auto": auto,
        "bytes": saved,
        "recovery": [recovery(workload, folder / "ours", resumes) for resumes in (False, True)],
    }


def idle_share(training: Training, way: str, block: int) -> float:
    """The greatest share of a block in which a stage of this process did nothing."""
    with training.pipe.timeline() as timeline:
        training.block(way, block)
    shares = []
    for stage in {event.stage for event in timeline.rows}:
        events = [e for e in timeline.rows if e.stage == stage and e.kind != "U"]
        span = max(e.end for e in events) - min(e.start for e in events)
        shares.append(1 - sum(e.end - e.start for e in events) / span)
    return max(shares)


def save_automatically(
    training: Training, block: int, folder: Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds per batch of blocks with saves as often as they may be on a slow disk, and without.

    Also how many batches there were from one save to the next.
    """
    found: dict[str, list[float]] = {"none": [], "auto": [], "batches": []}
    with (
        slow_disk(),
        pd2.Checkpointer(
            folder / "auto", training.pipe, training.opt, every="auto", keep=2
        ) as ckpt,
    ):
        for number in range(2 * rounds + 2):
            way = ("auto", "none", "none", "auto")[number % 4]
            with torch.no_grad():
                training.pipe(training.x)  # so that the batch after it is not one of those timed
            for _ in range(3):
                training.batch()
                if way == "auto":
                    ckpt.step()
            begin = time.perf_counter()
            for _ in range(block):
                training.batch()
                if way == "auto":
                    ckpt.step()
            if number >= 2:  # until it knows how often to save
                found[way].append((time.perf_counter() - begin) / block)
                found["batches"].append(ckpt.batches_between or math.nan)
            training.pipe.flush()  # a save may need it
            for saving in ckpt.under_way:
                saving.done.result()
    return found


def recovery(workload: Workload, folder: Path, resumes: bool) -> float:
    """Seconds from building a pipeline to the loss of its first batch."""
    begin = time.perf_counter()
    x, target = workload.batch(NUM_MICROBATCHES)
    pipe, opt = make(workload, x)
    if resumes:
        with pd2.Checkpointer(folder, pipe, opt, every=1000) as ckpt:
            assert ckpt.resume() > 0
    loss = pipe.train_step(x, target=target)
    opt.step()
    pipe.flush()
    float(loss)
    seconds = time.perf_counter() - begin
    pipe.close()
    return seconds


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=8).parse_args()
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    rounds, block = (1, 12) if options.smoke else (options.rounds, BLOCK)
    where = machine()
    print(describe(where), flush=True)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=memory))
    try:
        ranks = run_on_ranks(NUM_STAGES, measure, workload, rounds, block, folder)
    finally:
        shutil.rmtree(folder)
    first = ranks[0]
    mean = {way: [statistics.mean(times) for times in first["times"][way]] for way in WAYS}
    overheads = {
        way: [a / b - 1 for a, b in zip(mean[way], mean["none"], strict=True)] for way in WAYS
    }
    batches = sorted(t for times in first["times"]["saving"] for t in times)
    tail = batches[int(0.99 * (len(batches) - 1))] / statistics.median(batches)
    undisturbed = sorted(t for times in first["times"]["none"] for t in times)
    own_tail = undisturbed[int(0.99 * (len(undisturbed) - 1))] / statistics.median(undisturbed)
    auto = first["auto"]
    added = [a / b - 1 for a, b in zip(auto["auto"], auto["none"], strict=True)]
    idle = [max(r["idle"]["saving"] for r in ranks) - max(r["idle"]["none"] for r in ranks)]
    every = f"every {EVERY} batches"
    figures = [
        Figure("no saving", "seconds per batch", mean["none"]),
        Figure("no saving", "p99 of batch times over the median", [own_tail]),
        Figure(every, "added time", overheads["saving"], at_most=0.01, ideal=0.0),
        Figure(every, "p99 of batch times over the median", [tail], at_most=1.1),
        Figure(every, "further idle share of the idlest stage", idle, at_most=0.02),
        Figure(f"dcp.async_save {every}, drained", "added time", overheads["dcp"]),
        Figure("auto, 20 MB/s", "added time", added, at_most=0.035),
        Figure("auto, 20 MB/s", "batches between saves", auto["batches"]),
        Figure("new pipeline", "seconds to the first loss", [r["recovery"][0] for r in ranks]),
        Figure(
            "resumed", "seconds to the first loss", [r["recovery"][1] for r in ranks], at_most=3
        ),
    ]
    print_table(figures, judged=not options.smoke)
    print(f"saved: {sum(r['bytes'] for r in ranks):,} bytes")
    write_json(options.json, where, figures, smoke=options.smoke)


if __name__ == "__main__":
    main()
