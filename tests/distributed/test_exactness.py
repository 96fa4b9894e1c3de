"""One process per stage and replica trains what the definition says, as threads do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.oracle import Batch, Oracle
from tests.references.stock_orders import of_torch, zbv
from tests.runs.launch import run_ranks
from tests.runs.memory_in_flight import assert_as_simulated
from tests.runs.trajectory import (
    Trajectory,
    assert_close,
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    copy_of,
    drawing,
    expected,
    make_pipeline,
    sgd,
    version_options,
)
from tests.samples.models import TASKS, Task, whole
from tests.samples.schedule_sizes import V_SHAPED, sizes_for

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


RECOMPUTED = ("2bw", "2bw_split", "chimera", "2bw_v")
"""Threads recompute under every schedule: processes only send what the same code gives."""


class OwnSGD(torch.optim.SGD):
    """Not known to be SGD."""


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01)


def check(
    task: Task,
    d: int,
    m: int,
    rows: list[int],
    make: Make = sgd,
    schedule: str = "2bw",
    *,
    exact: bool = True,
    **options: Any,
) -> None:
    """On every rank; each compares the losses, and the parameters that it holds."""
    batches = task.batches(rows)
    shared = version_options(task, d, m, batches[0], schedule)
    want = expected(task, rows, m, make, schedule=schedule, **shared)
    got = by_pipeline(task, batches, d, m, make, schedule=schedule, **options)
    assert set(got.state) <= set(want.state)
    held = {name: want.state[name] for name in got.state}
    assert_same(got, dataclasses.replace(want, state=held), exact=exact)


def train_everything(rank: int, world_size: int) -> None:
    d = world_size
    torch.set_num_threads(1)
    for name in ("drawing", "fan", "gpt", "dropout in eval", "frozen"):
        task = TASKS[name]
        check(task, d, d, [2 * d] * 4, exact=task.exact)
    check(TASKS["mlp"], d, d + 1, [2 * d + 2] * 5)
    check(TASKS["mlp"], d, 2 * d + 1, [4 * d + 2, 4 * d + 3, 5 * d + 2, 4 * d + 2])
    for name in ("masked", "structures", "batch norm", "lstm", "branch"):
        if d in TASKS[name].depths:
            check(TASKS[name], d, d + 1, [2 * d + 2, 3 * d + 3, 2 * d + 3, 2 * d + 2])
            check(TASKS[name], d, d, [2 * d] * 4, rmsprop)
            # The gradient of a bias before BatchNorm is rounding alone, which Adam blows up.
            if name != "batch norm":
                check(TASKS[name], d, d, [2 * d] * 4, adamw, exact=False)
    check(TASKS["skips"], d, d, [2 * d] * 5, adamw, exact=False)
    every_schedule(d)
    if d == 2:
        rows = of_torch(zbv(2, 4).pipeline_order)
        zbv_csv = "\n".join(",".join(row) for row in rows)
        check(TASKS["skips"], 4, 4, [8] * 4, schedule=zbv_csv)
        evaluation_of_many_microbatches_with_several_stages_a_rank()
    one_process_gathers_what_all_hold(d)


def train_a_sample(rank: int, world_size: int) -> None:
    """Of ``train_everything`` what differs between two processes and more."""
    d = world_size
    torch.set_num_threads(1)
    check(TASKS["gpt"], d, d, [2 * d] * 4, exact=TASKS["gpt"].exact)
    check(TASKS["mlp"], d, 2 * d + 1, [4 * d + 2, 4 * d + 3, 5 * d + 2, 4 * d + 2])
    check(TASKS["skips"], d, d, [2 * d] * 5, adamw, exact=False)
    every_schedule(d, recomputes=False)
    one_process_gathers_what_all_hold(d)


def every_schedule(num_ranks: int, *, recomputes: bool = True) -> None:
    """One stage a rank, and where the schedule and a model allow it two: every V has two."""
    for schedule in pd2.schedule_names():
        task = TASKS["drawing"]
        of_ranks = [sizes for sizes in sizes_for(schedule, num_ranks) if sizes.stages_per_rank == 1]
        if 2 * num_ranks in task.depths:
            more = sizes_for(schedule, 2 * num_ranks)
            of_ranks += [sizes for sizes in more if sizes.stages_per_rank == 2]
        elif schedule in V_SHAPED:
            task, of_ranks = TASKS["mlp"], sizes_for(schedule, 2 * num_ranks)[:1]
        if not of_ranks:
            continue
        for sizes in of_ranks if num_ranks == 2 else of_ranks[-1:]:
            d, m, v = dataclasses.astuple(sizes)
            rows = [2 * m] * (d + 3 if m == 1 else 4)
            check(task, d, m, rows, schedule=schedule, stages_per_rank=v)
        if recomputes and schedule in RECOMPUTED:
            check(task, d, m, rows, schedule=schedule, stages_per_rank=v, recompute=True)
        if num_ranks == 4:
            assert_as_simulated(schedule, of_ranks[-1])


def evaluation_of_many_microbatches_with_several_stages_a_rank() -> None:
    """More microbatches than a channel holds messages."""
    task, m = TASKS["skips"], 16
    (batch,) = task.batches([2 * m])
    options: Any = {"schedule": "interleaved_2bw", "stages_per_rank": 2}
    with make_pipeline(task, 4, m, batch, **options) as pipe, torch.no_grad():
        output = pipe(*batch.args)
    if output is not None:
        model = task.model()
        parts = batch.args[0].tensor_split(m)
        assert torch.equal(output, torch.cat([model(part) for part in parts]))


def one_process_gathers_what_all_hold(d: int) -> None:
    """Flushing, loading, evaluating and the timeline, in processes."""
    task, m = TASKS["skips"], d
    batches = task.batches([2 * m] * 6)
    loaded = copy_of(task.model(seed=5).state_dict())

    def between(number: int, trained: Any, optimizer: Any) -> None:
        if number == 3:
            (trained.model if isinstance(trained, Oracle) else trained).load_state_dict(loaded)
            if isinstance(trained, Oracle):
                trained.restart_delay()

    want = by_oracle(task, batches, m, between=between)
    with make_pipeline(task, d, m, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        with pipe.timeline() as timeline:
            for number, batch in enumerate(batches):
                if number % 2:
                    pipe.flush()
                between(number, pipe, opt)
                # Only the first stage needs the arguments, only the last the target.
                args = batch.args if pipe.is_first_stage else ()
                target = batch.target if pipe.is_last_stage else None
                losses.append(pipe.train_step(*args, target=target))
                opt.step()
        assert [float(loss) for loss in losses] == want.losses
        full = pipe.full_state_dict()
        assert len(full) == (len(want.state) if pipe.rank == 0 else 0)
        if pipe.rank == 0:
            assert_same_state(full, want.state)
        versions = {(e.stage, e.batch, e.version) for e in timeline.gather() if e.kind != "U"}
        read = [0, 0, 1, 3, 3, 4]
        expected = {(i, t, read[t]) for i in range(d) for t in range(6)}
        assert versions == (expected if pipe.rank == 0 else set())
        assert all(stage.most_live_versions == 2 for stage in pipe.memory_report().values())
        with torch.no_grad():
            output = pipe(*batches[0].args)
        if not pipe.is_last_stage:
            assert output is None
            return
        model = task.model()
        model.load_state_dict(want.state)
        parts = batches[0].args[0].tensor_split(m)
        assert torch.equal(output, torch.cat([model(part) for part in parts]).detach())


def saved_and_resumed(rank: int, world_size: int) -> None:
    """Adam's state survives in this rank's part of the optimizer's state_dict."""
    task, m, d = TASKS["skips"], 3, world_size
    batches = task.batches([6] * 6)

    def restart(number: int, trained: Any, optimizer: Any) -> None:
        if number == 3:
            trained.restart_delay()

    want = by_oracle(task, batches, m, adamw, restart)
    saved: list[Any] = []
    for part in (batches[:3], batches[3:]):
        with make_pipeline(task, d, m, batches[0]) as pipe:
            opt = pd2.PipelineOptimizer(adamw(pipe.parameters()))
            if saved:
                pipe.load_state_dict(saved[0], strict=False)
                opt.load_state_dict(saved[1])
            for batch in part:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            saved = [copy_of(pipe.state_dict()), opt.state_dict()]
            for index, state in saved[1]["state"].items():
                saved[1]["state"][index] = copy_of(state)
    for name, tensor in saved[0].items():
        assert_close(name, tensor, want.state[name])


def replicas_average(rank: int, world_size: int, width: int) -> None:
    """Every replica has its own batches, of its own size, and all get the same weights."""
    d = world_size // width
    for name, make, m, uneven in (
        ("mlp", sgd, d, 0),
        ("drawing", adamw, d + 1, 1),
        ("gpt", sgd, d + 1, 1),
        ("skips", rmsprop, d, 0),
    ):
        task = TASKS[name]
        by_replica = [
            task.batches([2 * m + uneven * (r + t) for t in range(5)], seed=10 + r)
            for r in range(width)
        ]
        # Sums at the end; and begun one parameter after the other.
        for bucket_cap_mb in (25.0, 1e-6) if name == "mlp" else (1e-6,):
            replicas_follow_the_mean(task, by_replica, make, d, m, bucket_cap_mb=bucket_cap_mb)
    with delays_everywhere(0.02):  # one replica's sums begin while the other still waits
        replicas_follow_the_mean(task, by_replica, rmsprop, d, m, bucket_cap_mb=1e-6)
    if d in TASKS["branch"].depths or d == 1:
        return
    batch_norm_statistics_stay_per_replica(width, d)


def replicas_follow_the_mean(
    task: Task,
    by_replica: list[list[Batch]],
    make: Make,
    d: int,
    m: int,
    schedule: str = "2bw",
    **options: Any,
) -> None:
    width = len(by_replica)
    model = whole(task.model())
    oracle = Oracle(
        model,
        make(model.parameters()),
        m,
        task.loss_fn,
        delay=int(schedule == "2bw"),
        num_pipelines=1 + int(schedule == "chimera"),
        drawing=drawing,
    )
    want = [oracle.train_replicas(batches) for batches in zip(*by_replica, strict=True)]
    own = torch.distributed.get_rank() // d
    options |= {"model": task.model(seed=1), "width": width, "schedule": schedule}
    with make_pipeline(task, d, m, by_replica[0][0], **options) as pipe:
        assert pipe.replica == own
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        losses = []
        for number, batch in enumerate(by_replica[own]):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            if make is sgd and number == 3:  # its step, elsewhere in memory: gradients move
                opt = pd2.PipelineOptimizer(OwnSGD(pipe.parameters(), lr=opt.defaults["lr"]))
            opt.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    state = {name: model.state_dict()[name] for name in got.state}
    # AdamW's step is not to the bit that of the unsplit model's.
    assert_same(got, Trajectory([of_all[own] for of_all in want], state), exact=make is not adamw)


def batch_norm_statistics_stay_per_replica(width: int, d: int) -> None:
    task, m = TASKS["batch norm"], d
    batches = task.batches([2 * m], seed=20) + task.batches([2 * m], seed=21)
    own = torch.distributed.get_rank() // d
    pipe = make_pipeline(task, d, m, batches[0], width=width)
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        pipe.train_step(*batches[own].args, target=batches[own].target)
        opt.step()
        mine = copy_of(pipe.state_dict())
        full = pipe.full_state_dict()
    for replica, batch in enumerate(batches):
        model = task.model()
        for part in batch.args[0].tensor_split(m):
            model(part)
        for name, value in model.state_dict().items():
            if "running" in name and replica == own and name in mine:
                assert torch.equal(mine[name], value), name
            if "running" in name and replica == 0 and full:
                assert torch.equal(full[name], value), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_stages", [2, *exhaustive(3, 4, 5, 6)])
def test_stages_in_processes_equal_the_definition(num_stages: int) -> None:
    run_ranks(train_everything, num_stages, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_four_stages_in_processes_equal_the_definition() -> None:
    run_ranks(train_a_sample, 4, timeout=180)


@pytest.mark.slow
def test_a_run_in_processes_is_saved_and_resumed() -> None:
    run_ranks(saved_and_resumed, 2, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "num_stages"), [(2, 2), (4, 1), *exhaustive((2, 1), (3, 1))])
def test_replicas_in_processes_equal_the_definition(width: int, num_stages: int) -> None:
    run_ranks(replicas_average, width * num_stages, args=[width], timeout=280)
