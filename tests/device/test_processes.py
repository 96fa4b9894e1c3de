"""Processes with a device each train over a group like NCCL's, with its waits and its refusals."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw.ranks import channels, grid
from pipedream2bw.ranks.groups import new_group, runs_on_device
from tests.device import checked
from tests.device.on_device import batch_on, check_on_device, on
from tests.exhaustive import exhaustive
from tests.runs.launch import run_ranks
from tests.runs.trajectory import (
    Between,
    Trajectory,
    assert_same,
    by_oracle,
    by_pipeline,
    do_nothing,
    expected,
    go_on,
    make_pipeline,
)
from tests.samples.models import TASKS, Task, whole
from tests.samples.schedule_sizes import sizes_for
from tests.samples.tied_models import TIED, summing, untied
from tests.unit.training.test_tied import SGD, sgd


def join(rank: int, drains: float) -> str:
    """Makes this process's group and gives its device."""
    torch.set_num_threads(1)
    device = f"checked:{rank}"
    torch.accelerator.set_device_index(rank)
    if not dist.is_initialized():
        dist.init_process_group("checked")
    # Whatever waits for a device on a real one does so here at random.
    checked.set_drains(at_first_use=True, probability=drains, seed=rank)
    checked.set_timeout(20.0)
    return device


def train_over_a_group(rank: int, world: int, schedules: list[str]) -> None:
    """Where processes share no memory of their devices, as on several machines."""
    with (
        mock.patch.object(channels, "make_device_ring", return_value=None),
        mock.patch.object(channels, "options_of_messages", return_value=None) as options,
    ):
        train_every_schedule(rank, world, schedules)
    assert {call.args for call in options.call_args_list} == {("checked",)}


def train_every_schedule(rank: int, world: int, schedules: list[str]) -> None:
    evaluated = [each for each in schedules if each in EVALUATED]
    # Skip connections are several messages an action. "drawing" draws in evaluations, too.
    train_schedules(rank, world, schedules, "drawing")
    train_schedules(rank, world, evaluated, "skips", evaluates=True)
    train_schedules(rank, world, [each for each in schedules if each not in EVALUATED], "mlp")


EVALUATED = ("2bw", "chimera", "interleaved", "2bw_v")
"""Schedules of which training is interrupted by an evaluation, with one and two stages a rank."""


def evaluating(task: Task, schedule: str, m: int) -> Between:
    """After two batches the pipeline gives what the oracle's model does. Then training goes on."""
    args = task.batches([5])[0].args

    def between(number: int, pipe: Any, optimizer: Any) -> None:
        if number != 2:
            return
        pipe.eval()
        output = pipe(*args)
        pipe.train()
        assert (output is not None) == pipe.gives_output
        if pipe.gives_output:
            model = whole(task.model())
            model.load_state_dict(expected(task, [2 * m] * 2, m, schedule=schedule).state)
            torch.testing.assert_close(output.cpu(), model.eval()(*args), rtol=1e-5, atol=1e-6)

    return between


def train_schedules(
    rank: int, world: int, schedules: list[str], name: str, *, evaluates: bool = False
) -> None:
    device = join(rank, drains=0.05)
    for schedule in schedules:
        of_ranks = [sizes for sizes in sizes_for(schedule, world) if sizes.stages_per_rank == 1]
        if not of_ranks and world < 4:  # the model has no eight stages
            more = sizes_for(schedule, 2 * world)
            of_ranks = [sizes for sizes in more if sizes.stages_per_rank == 2]
        for sizes in of_ranks[:1]:
            m = sizes.num_microbatches
            with checked.expect_no_errors():
                check_on_device(
                    TASKS[name],
                    sizes.num_stages,
                    m,
                    [2 * m] * 4,
                    home=device,
                    num_devices=None,
                    schedule=schedule,
                    stages_per_rank=sizes.stages_per_rank,
                    between=evaluating(TASKS[name], schedule, m) if evaluates else do_nothing,
                )


@pytest.mark.parametrize(
    ("world", "train"),
    [
        (2, train_over_a_group),
        (3, train_every_schedule),
        *exhaustive((3, train_over_a_group), (4, train_over_a_group)),
        *exhaustive((2, train_every_schedule), (4, train_every_schedule)),
    ],
)
def test_every_schedule_in_processes(world: int, train: Callable[..., None]) -> None:
    run_ranks(
        train,
        world,
        args=(pd2.schedule_names(),),
        rendezvous="environment",
        timeout=200,
    )


def train_in_one_queue(rank: int, world: int, schedules: list[str]) -> None:
    """Where everything that a device is given waits for all that it was given before."""
    join(rank, drains=0.0)
    checked.set_one_queue(True)
    with mock.patch.object(channels, "make_device_ring", return_value=None):
        train_schedules(rank, world, schedules, "skips")


@pytest.mark.parametrize(
    ("world", "schedules"),
    [
        (3, ("2bw", "zero_bubble", "interleaved")),
        (4, ("chimera",)),
        *exhaustive((4, tuple(pd2.schedule_names()))),
    ],
)
def test_streams_may_share_one_queue(world: int, schedules: tuple[str, ...]) -> None:
    run_ranks(train_in_one_queue, world, args=(schedules,), rendezvous="environment", timeout=200)


def add_up_in_one_queue(rank: int, world: int, replica_sums: str) -> None:
    device, task, m = join(rank, drains=0.05), TASKS["skips"], 4
    checked.set_one_queue(True)
    batches = [batch_on(batch, device) for batch in task.batches([2 * m] * 4)]
    options: dict[str, Any] = {"width": 2, "replica_sums": replica_sums}
    with (
        checked.expect_no_errors(),
        mock.patch.object(channels, "make_device_ring", return_value=None),
        make_pipeline(on(task, device), 2, m, batches[0], bucket_cap_mb=1e-4, **options) as pipe,
    ):
        go_on(pipe, pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=1.0), batches)


@pytest.mark.parametrize("replica_sums", ["ordered", "all_reduce"])
def test_sums_and_messages_may_share_one_queue(replica_sums: str) -> None:
    run_ranks(add_up_in_one_queue, 4, args=(replica_sums,), rendezvous="environment", timeout=60)


def count_connections(rank: int, world: int, schedule: str, width: int, replica_sums: str) -> None:
    device = join(rank, drains=0.05)
    task, m = TASKS["mlp"], 4
    batches = [batch_on(batch, device) for batch in task.batches([2 * m] * 4)]
    options: dict[str, Any] = {"schedule": schedule, "width": width, "replica_sums": replica_sums}
    with (
        checked.expect_no_errors(),
        make_pipeline(on(task, device), 2, m, batches[0], bucket_cap_mb=1e-4, **options) as pipe,
    ):
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        made = checked.num_connections()
        assert made > 0
        go_on(pipe, opt, batches)
        assert checked.num_connections() == made
        # A sum may wait for what the device does first: only the pipeline's rules end that.
        assert checked.last_timeout_set() == datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("schedule", "width", "replica_sums"),
    [("2bw", 2, "ordered"), ("2bw", 2, "all_reduce"), ("chimera", 1, "ordered")],
)
def test_devices_are_connected_before_the_first_batch(
    schedule: str, width: int, replica_sums: str
) -> None:
    run_ranks(
        count_connections,
        2 * width,
        args=(schedule, width, replica_sums),
        rendezvous="environment",
        timeout=60,
    )


def evaluate_between(rank: int, world: int) -> None:
    """Training and evaluation have a wiring each, over the same channels."""
    device, task, m = join(rank, drains=0.0), TASKS["skips"], 3
    batches = [batch_on(batch, device) for batch in task.batches([2 * m] * 3)]
    with checked.expect_no_errors(), make_pipeline(on(task, device), 2, m, batches[0]) as pipe:
        go_on(pipe, pd2.PipelineOptimizer(sgd(pipe.parameters())), batches)
        (trained,) = pipe.memory_report().values()
        pipe.eval()
        pipe(*batches[0].args)
        (evaluated,) = pipe.memory_report().values()
    assert evaluated.message_buffers == trained.message_buffers > 0


def test_memory_of_messages_counts_once_where_training_and_evaluation_share_it() -> None:
    run_ranks(evaluate_between, 2, rendezvous="environment", timeout=60)


def check_tied(device: str, schedule: str = "2bw", **options: Any) -> None:
    """The pipeline on the device trains a tied model as stock torch does on the CPU."""
    task, m = TIED["language model"], 4
    batches = task.batches([2 * m] * 4)
    model = whole(untied(task.model()))
    make = summing(torch.optim.SGD, **SGD)
    want = by_oracle(task, batches, m, make, model=model, schedule=schedule)
    there = [batch_on(batch, device) for batch in batches]
    options = {"schedule": schedule, **options}
    got = by_pipeline(on(task, device), there, dist.get_world_size(), m, sgd, **options)
    held = {name: want.state[name] for name in got.state}
    assert_same(got.on_host(), Trajectory(want.losses, held))


def train_tied(rank: int, world: int) -> None:
    device = join(rank, drains=0.05)
    on_device = []  # of each group that joins this process to others with one of its stages

    def make(*args: Any) -> Any:
        made = new_group(*args)
        if made is not None:
            on_device.append(runs_on_device(made))
        return made

    with checked.expect_no_errors(), mock.patch.object(grid, "new_group", make):
        check_tied(device)
        check_tied(device, "1f1b")
        check_tied(device, "zero_bubble")
        check_tied(device, optimizer_device="cpu")
    assert bool(on_device) == (rank in (0, world - 1))
    assert not any(on_device), "an update waits for others' updates on its device"


@pytest.mark.parametrize("world", [2, 3])
def test_tied_weights_go_over_hosts(world: int) -> None:
    run_ranks(train_tied, world, rendezvous="environment", timeout=100)
