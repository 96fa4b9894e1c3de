"""What saving a checkpoint costs a run that goes on training meanwhile.

A model of 4.7 million parameters (AdamW, float32; 16 bytes a parameter are saved) in two stages,
one process each, on 8,192 tokens a batch: two fifths of the tokens a parameter of GPT-2's batches.
Processes and cores are as many, so that nothing of a save is for free.

Groups of ten batches take turns in one run that is not drained in between, in the order A B C C B
A, so that a machine that becomes slower or faster is no part of the figures: without saving; with a
save into memory (/dev/shm) in the group; with torch.distributed.checkpoint's async_save of the same
newest weights and moments after a drain. A round is two such rows, and gives one value.

The same, without async_save, with both stages in threads of one process: there a writer that holds
Python's lock would disturb them most. And in two processes whose blocks compute little and sleep
long, as where accelerators compute: there the times of batches are alike, and what a save adds to
the longest ones is not lost among them.

Such processes also save as often as ``every="auto"`` says, on one disk of 20 MB/s for all processes
and files (writes wait as long as it would take), in turns with batches without saving (A B B A),
and again when that disk has become four times slower while training went on.

Then processes that begin as ``python`` does: the seconds from the end of their imports (of torch
and the package), and from their start, to the loss of the first batch, with and without resuming
from the last checkpoint. Joining the other process, building model and pipeline and the batch
itself count, too; that has a quarter of the rows, so that the figures say how long a restart takes
and not how fast the machine computes.

    python benchmarks/saving.py [--only busy,threads,sleep,recovery] [--rounds 8] [--smoke]
        [--json PATH]
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring.groups import (
    Group,
    added_time,
    note_idleness,
    seconds_of,
)
from measuring.ranks import run_on_fresh_ranks, run_on_ranks, seconds_of_process
from measuring.report import Figure, add_only, arguments, describe, machine, print_table, write_json
from measuring.saving_figures import (
    EVERY,
    SLOWER,
    WAYS,
    Automatic,
    Measured,
    figures_of_saves_alone,
    figures_of_training,
)
from measuring.slow_disk import SlowDisk, checkpoints_on
from measuring.stages import Workload
from torch import nn

import pipedream2bw as pd2

IMPORTED = time.perf_counter()

NUM_STAGES = 2
NUM_MICROBATCHES = 4
WORKLOAD = Workload("transformer", rows=16, hidden=256, layers=3, sequence=128)
SMOKE_WORKLOAD = Workload("transformer", rows=1, hidden=32, layers=1, sequence=8)
SLEEP = {"rows": 1, "sequence": 8, "forward_seconds": 0.02, "backward_seconds": 0.04}
SMOKE_SLEEP = {"forward_seconds": 0.002, "backward_seconds": 0.004}
SECTIONS = ("busy", "threads", "sleep", "recovery")
ROW = (*WAYS, *reversed(WAYS))
SHORT_ROW = ("none", "saving", "saving", "none")
DISK_BYTES_PER_SECOND = 20e6
SMOKE_AUTO_BATCHES = (4, 8)
AUTO_BATCHES = (20, 60)
"""In a block of ``every="auto"``, at least and at most; else as many as from save to save."""
MOST_BATCHES_TO_ADAPT = 300
RECOVERY_SECONDS = 3.0
"""What a resumed run may take to its first loss, beside reading its checkpoint."""


def make(workload: Workload, x: torch.Tensor) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    pipe = pd2.PipelineModule(
        [workload.stage(index) for index in range(NUM_STAGES)],
        nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        example_args=(x[: workload.rows],),
        timeout=120.0,
    )
    return pipe, pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-4))


def greatest(value: int) -> int:
    """The greatest value of all ranks. Every rank calls it."""
    held = torch.tensor(value)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


class Training:
    """Trains batch by batch; a loss is read two batches later."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.x, self.target = workload.batch(NUM_MICROBATCHES)
        self.pipe, self.opt = make(workload, self.x)
        self.folder = folder
        self.losses: list[Any] = []
        self.updates = 0

    def batch(self) -> None:
        if len(self.losses) >= 2:
            float(self.losses.pop(0))
        self.losses.append(self.pipe.train_step(self.x, target=self.target))
        self.opt.step()
        self.updates += 1

    def fill(self) -> None:
        """Until the pipeline is full."""
        self.losses.clear()
        for _ in range(3):
            self.batch()

    def save_by_dcp(self) -> Any:
        self.pipe.flush()
        state = {"model": self.pipe.state_dict(), "optimizer": {}}
        self.opt.state_dict()
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        for parameter, of_one in self.opt.state.items():
            for key, value in of_one.items():
                state["optimizer"][f"{names[id(parameter)]}.{key}"] = value
        return dcp.async_save(state, checkpoint_id=str(self.folder / "dcp"))


# ---------------------------------------------------------------- saves every ten batches


def train_group(training: Training, saver: pd2.Checkpointer, way: str) -> Group:
    """Begins one batch before a save; all that the save takes is in the group's time."""
    seconds = []
    during_save = 0
    saving_by_dcp = None
    processor = time.process_time()
    last = time.perf_counter()
    for number in range(EVERY):
        if saver.under_way:
            during_save = number + 1
        training.batch()
        if way == "saving":
            saver.step()
        elif way == "dcp" and number == 0:
            saving_by_dcp = training.save_by_dcp()
        if number == EVERY - 1:
            for saving in saver.under_way:
                saving.done.result()
            if saving_by_dcp is not None:
                saving_by_dcp.result()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return Group(way, seconds, time.process_time() - processor, during_save)


def train_round(
    training: Training, saver: pd2.Checkpointer, ways: Sequence[str] = 2 * ROW
) -> list[Group]:
    with training.pipe.timeline() as timeline:
        first = training.updates
        training.fill()
        while training.updates % EVERY != EVERY - 1:  # the first batch of a group is saved
            training.batch()
        before = training.updates - first
        groups = [train_group(training, saver, way) for way in ways]
        training.batch()  # where the last group's time ends
    note_idleness(groups, timeline.rows, min(e.batch for e in timeline.rows) + before)
    return groups


# ---------------------------------------------------------------- saves as often as they may be


def adapt(training: Training, ckpt: pd2.Checkpointer, is_followed: Callable[[], bool]) -> int:
    """Trains until rank 0 says that the frequency has followed; gives the number of batches."""
    decides = dist.get_rank() == 0
    for number in range(MOST_BATCHES_TO_ADAPT):
        if greatest(decides and is_followed()):
            return number
        training.batch()
        ckpt.step()
    return MOST_BATCHES_TO_ADAPT


def train_block(
    training: Training, ckpt: pd2.Checkpointer | None, batches: int
) -> tuple[float, int, int]:
    """Gives the seconds, batches and saves of a block that begins and ends without a save."""
    with torch.no_grad():
        training.pipe(training.x)  # so that the batch after it is not one that the saver times
    training.fill()
    saves: dict[int, pd2.Saving] = {}
    begin, number = time.perf_counter(), 0
    while number < batches or greatest(not all(saving.done.done() for saving in saves.values())):
        training.batch()
        if ckpt is not None and number < batches:
            ckpt.step()
            saves |= {saving.step: saving for saving in ckpt.under_way}
        number += 1
    return time.perf_counter() - begin, number, len(saves)


def train_automatically(
    training: Training,
    ckpt: pd2.Checkpointer,
    rounds: int,
    adapted: int,
    limits: tuple[int, int],
) -> Automatic:
    """Each round's added time is that of a save, over that of the batches between two saves."""
    least, most = limits
    found = Automatic(adapted, [], [])
    for _ in range(rounds):
        batches = min(max(least, greatest(ckpt.batches_between or 0)), most)
        blocks: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
        for is_saving in (False, True, True, False):
            blocks[is_saving].append(train_block(training, ckpt if is_saving else None, batches))
        alone = sum(b[0] for b in blocks[False]) / sum(b[1] for b in blocks[False])
        added = sum(seconds - alone * number for seconds, number, _ in blocks[True])
        saves = sum(b[2] for b in blocks[True])
        between = ckpt.batches_between or batches
        # No save in the blocks: it is rarer than they are long.
        of_one, batches_of_one = (added / saves, between) if saves else (added, 2 * batches)
        found.between.append(between)
        found.added.append(of_one / (batches_of_one * alone))
    return found


def save_automatically(
    training: Training,
    folder: Path,
    rounds: int,
    size: int,
    period: float,
    limits: tuple[int, int],
) -> list[Automatic]:
    """On the disk, and when it has become slower.

    Args:
        limits: the least and the greatest number of batches of a block.
        size: bytes of a checkpoint.
        period: seconds of a batch.
    """
    disk = SlowDisk(folder / "disk")
    found = []
    with (
        checkpoints_on(disk),
        pd2.Checkpointer(
            folder / "auto", training.pipe, training.opt, every="auto", keep=2
        ) as ckpt,
    ):
        training.fill()
        for slower in (1, SLOWER):
            speed = DISK_BYTES_PER_SECOND / slower
            disk.set_speed(speed)
            least = 0.9 * size / speed / period  # as far as the period is known
            adapted = adapt(training, ckpt, lambda: (ckpt.batches_between or 0) >= least)  # noqa: B023
            train_block(training, ckpt, limits[0])  # it may learn more
            found.append(train_automatically(training, ckpt, rounds, adapted, limits))
    return found


# ---------------------------------------------------------------- what the ranks do


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, folder: Path
) -> list[list[Group]]:
    """Runs on every rank."""
    training = Training(workload, folder)
    with pd2.Checkpointer(
        folder / "ours", training.pipe, training.opt, every=EVERY, keep=2
    ) as saver:
        train_round(training, saver, WAYS)  # the first save makes room for the copies
        groups = []
        for number in range(rounds):
            groups.append(train_round(training, saver))
            if rank == 0:
                added = [f"{way} {added_time(groups[-1], way):+.2%}" for way in WAYS[1:]]
                print(f"round {number + 1}, added time: {', '.join(added)}", flush=True)
    training.pipe.close()
    return groups


def measure_saves_alone(
    rank: int,
    world_size: int,
    workload: Workload,
    rounds: int,
    folder: Path,
    limits: tuple[int, int] | None,
) -> Measured:
    """Runs on every rank; in one process with a thread for each stage. ``limits``: of "auto"."""
    training = Training(workload, folder)
    own = folder / "ours"
    with pd2.Checkpointer(own, training.pipe, training.opt, every=EVERY, keep=2) as saver:
        train_round(training, saver, SHORT_ROW)
        groups = [train_round(training, saver, 2 * SHORT_ROW) for _ in range(rounds)]
    automatic = []
    if limits is not None:
        period = statistics.median(seconds_of([g for each in groups for g in each], "none"))
        size = sum(path.stat().st_size for path in newest_files(own))
        automatic = save_automatically(training, folder, rounds, size, period, limits)
    training.pipe.close()
    return Measured(groups, automatic)


def save_once(rank: int, world_size: int, workload: Workload, folder: Path) -> None:
    """Runs on every rank."""
    training = Training(workload, folder)
    training.fill()
    saving = pd2.save(folder / "ours", training.pipe, training.opt)
    training.pipe.flush()
    saving.done.result()
    training.pipe.close()


def recovery(
    rank: int, world_size: int, workload: Workload, folder: Path, resumes: bool
) -> tuple[float, float]:
    """Runs on every rank, fresh: seconds to its first loss, since its imports and its start."""
    x, target = workload.batch(NUM_MICROBATCHES)
    pipe, opt = make(workload, x)
    with pipe:
        ckpt = pd2.Checkpointer(folder / "ours", pipe, opt, every=1000) if resumes else None
        if ckpt is not None and ckpt.resume() == 0:
            raise FileNotFoundError(f"{folder / 'ours'}: no checkpoint")
        loss = pipe.train_step(x, target=target)
        opt.step()
        pipe.flush()
        float(loss)
        seconds = time.perf_counter() - IMPORTED, seconds_of_process()
        if ckpt is not None:
            ckpt.close()
    return seconds


def newest_files(folder: Path) -> list[Path]:
    """The files of the newest checkpoint."""
    return sorted(max(folder.glob("step-*")).iterdir())


def seconds_to_read(files: Sequence[Path]) -> float:
    buffer = bytearray(16 * 2**20)
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


# ---------------------------------------------------------------- figures


def figures_of_recovery(
    workload: Workload, folder: Path, resumes: Sequence[bool], times: int
) -> list[Figure]:
    """The last rank's seconds count: the loss is there when it is on all."""
    files = newest_files(folder / "ours")
    size = sum(path.stat().st_size for path in files)
    reading = [seconds_to_read(files) for _ in range(3)]
    print(
        f"a checkpoint has {size:,} bytes, which are read at "
        f"{size / statistics.median(reading) / 1e6:,.0f} MB/s"
    )
    most = RECOVERY_SECONDS + statistics.median(reading)
    seconds: dict[bool, list[tuple[float, float]]] = {each: [] for each in resumes}
    for _ in range(times):
        for each in resumes:
            of_ranks = run_on_fresh_ranks(NUM_STAGES, recovery, workload, folder, each)
            imported, started = zip(*of_ranks, strict=True)
            seconds[each].append((max(imported), max(started)))
    figures = []
    for each, of_each in seconds.items():
        setting = f"fresh processes, {'resumed' if each else 'new'}"
        imported, started = zip(*of_each, strict=True)
        limit = round(most, 2) if each else None
        since = "seconds from {} to the first loss".format
        figures += [
            Figure(setting, since("the end of imports"), list(imported), at_most=limit),
            Figure(setting, since("the start of the process"), list(started)),
        ]
    return figures


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=8)
    add_only(parser, SECTIONS)
    options = parser.parse_args()
    workload = SMOKE_WORKLOAD if options.smoke else WORKLOAD
    sleeping = dataclasses.replace(workload, **(SMOKE_SLEEP if options.smoke else SLEEP))
    rounds = 1 if options.smoke else options.rounds
    recoveries = ((True,), 1) if options.smoke else ((False, True), 3)
    where = machine()
    print(describe(where), flush=True)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=memory))
    figures = []
    try:
        if "busy" in options.only:
            busy = run_on_ranks(NUM_STAGES, measure, workload, rounds, folder / "busy")
            figures += figures_of_training(busy)
        for section, name, ranks, stages in (
            ("threads", "stages in threads", 1, workload),
            ("sleep", "stages that sleep", NUM_STAGES, sleeping),
        ):
            if section in options.only:
                limits = SMOKE_AUTO_BATCHES if options.smoke else AUTO_BATCHES
                wanted = (stages, rounds, folder / section, limits if ranks > 1 else None)
                found = run_on_ranks(ranks, measure_saves_alone, *wanted)
                figures += figures_of_saves_alone(name, found)
        if "recovery" in options.only:
            short = dataclasses.replace(workload, rows=-(-workload.rows // 4))
            run_on_ranks(NUM_STAGES, save_once, short, folder / "recovery")
            figures += figures_of_recovery(short, folder / "recovery", *recoveries)
    finally:
        shutil.rmtree(folder)
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures, smoke=options.smoke)


if __name__ == "__main__":
    main()
