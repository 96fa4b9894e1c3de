"""Fresh forwards between processes: measured, clipped, over late messages, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    copy_of,
    make_pipeline,
    stage_of_parameters,
)
from tests.samples.models import TASKS, whole
from tests.unit.training.test_fresh_forwards import ClippedSGD

TASK, M, COUNT = TASKS["skips"], 6, 9


def make(parameters: Any, *, clips: bool) -> torch.optim.Optimizer:
    kind = ClippedSGD if clips else torch.optim.SGD
    return kind(parameters, lr=0.3)


def train(rank: int, world: int, width: int, slots: int | str, clips: bool, path: str) -> Any:
    """The numbers that were late in each batch; training stops after five, and goes on."""
    torch.set_num_threads(1)
    d = world // width
    by_replica = [TASK.batches([2 * M] * COUNT, seed=20 + replica) for replica in range(width)]
    options: dict[str, Any] = {"schedule": "2bw_fresh", "update_slots": slots, "width": width}
    losses, late = [], []
    for first, end in ((0, 5), (5, COUNT)):
        with make_pipeline(TASK, d, M, by_replica[0][0], **options) as pipe:
            own = torch.optim.SGD(pipe.parameters(), lr=0.3)
            opt = pd2.PipelineOptimizer(own, max_grad_norm=0.1 if clips else None)
            if first > 0:
                pd2.load(path, pipe, opt)
            for batch in by_replica[pipe.replica][first:end]:
                losses.append(pipe.train_step(*batch.args, target=batch.target))
                late.append(pipe.late_forwards)
                opt.step()
            if end < COUNT:
                pd2.save(path, pipe, opt).wait()
            losses = [float(loss) for loss in losses]
            state, stage_of = copy_of(pipe.state_dict()), stage_of_parameters(pipe)
            replica = pipe.replica
    model = whole(TASK.model())
    names = [name for name, _ in model.named_parameters()]
    oracle = Oracle(model, make(model.parameters(), clips=clips), M, TASK.loss_fn, delay=1)
    want = []
    for number, batches in enumerate(zip(*by_replica, strict=True)):
        oracle.late = [late[number][stage_of[name]] for name in names]
        want.append(oracle.train_replicas(batches)[replica])
    held = {name: model.state_dict()[name] for name in state}
    assert_same(Trajectory(losses, state), Trajectory(want, held))
    return late


def over_late_messages(rank: int, world: int, *given: Any) -> Any:
    with delays_everywhere(0.01):
        return train(rank, world, *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "width", "slots", "clips"),
    [
        *((3, 1, "auto", False), (3, 1, 2, True), (4, 2, "auto", True), (4, 2, 1, False)),
        *exhaustive((5, 1, 1, True), (6, 1, 1, False), (6, 1, "auto", True)),
    ],
)
def test_all_ranks_train_the_definition(
    world: int, width: int, slots: int | str, clips: bool, tmp_path: Path
) -> None:
    given = (width, slots, clips, str(tmp_path))
    results = run_ranks(over_late_messages, world, args=given, timeout=120)
    late = results[0].value
    assert all(result.value == late for result in results)
    assert sum(late[-1]) <= (world // width) * M
    if slots == "auto":
        assert late[:3] == [(M,) * (world // width)] * 3
        assert late[3:] == [late[3]] * (COUNT - 3)


def refused(rank: int, world: int, path: str) -> str:
    torch.set_num_threads(1)
    (batch,) = TASK.batches([2 * M])
    with make_pipeline(TASK, world, M, batch, schedule="2bw_fresh") as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.3))
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
        pd2.save(path, pipe, opt).wait()
    with make_pipeline(TASK, world, M, batch, schedule="2bw_fresh", update_slots=2) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.3))
        with pytest.raises(ValueError, match=r"late_forwards: \[3, 2\], the checkpoint") as error:
            pd2.load(path, pipe, opt)
    return str(error.value)


@pytest.mark.slow
def test_every_rank_refuses_another_runs_numbers(tmp_path: Path) -> None:
    for result in run_ranks(refused, 2, args=(str(tmp_path),), timeout=60):
        assert "they must be equal" in result.value
