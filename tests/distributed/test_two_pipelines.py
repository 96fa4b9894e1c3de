"""Two pipelines in opposite directions, one process per rank: each holds a stage of both."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.distributed.test_exactness import adamw, check, replicas_follow_the_mean, rmsprop
from tests.exhaustive import exhaustive
from tests.runs.launch import in_turn, run_ranks
from tests.runs.trajectory import by_oracle, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS

SOON = 20.0


def train_everything(rank: int, world_size: int) -> None:
    d = world_size
    torch.set_num_threads(1)
    for schedule in ("chimera", "chimera_doubled"):
        check(TASKS["mlp"], d, 2 * d, [4 * d] * 5, schedule=schedule)
    for name in ("skips", "gpt", "frozen"):
        check(TASKS[name], d, d, [2 * d] * 4, exact=TASKS[name].exact, schedule="chimera")
    # Uneven microbatches, and units that are not full.
    check(TASKS["mlp"], d, d + 2, [2 * d + 4, 2 * d + 5, 3 * d + 5, 2 * d + 4], schedule="chimera")
    check(TASKS["skips"], d, 2, [4] * 4, rmsprop, schedule="chimera")
    check(TASKS["skips"], d, d, [2 * d] * 4, adamw, schedule="chimera", exact=False)
    copies_stay_bitwise_equal(rank, d)
    both_ends_are_given_the_batch(rank, d)
    what_is_set_on_one_copy_is_set_on_both(rank, d)


def weights_of_copies(pipe: pd2.PipelineModule) -> list[tuple[int, list[bytes]]]:
    """Of each local stage: which of the model's it is, and its newest weights' bits."""
    return [
        (
            stage.index % pipe.num_stages,
            [
                buffer.numpy().tobytes()
                for buffer in stage.weights.engine.slot_buffers(stage.weights.engine.newest_slot)
            ],
        )
        for stage in pipe.session.stages
    ]


def assert_copies_equal(pipe: pd2.PipelineModule) -> None:
    pipe.flush()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, weights_of_copies(pipe))
    copies: dict[int, list[list[bytes]]] = {}
    for stage, weights in (pair for part in everyone for pair in part):
        copies.setdefault(stage, []).append(weights)
    assert sorted(copies) == list(range(pipe.num_stages))
    for weights in copies.values():
        assert len(weights) == 2 * pipe.width
        assert all(other == weights[0] for other in weights)


def copies_stay_bitwise_equal(rank: int, d: int) -> None:
    task, m = TASKS["skips"], 2 * d
    batches = task.batches([2 * m] * 30)
    # Initial weights are pipeline 0's: every rank begins with others.
    pipe = make_pipeline(
        task, d, m, batches[0], schedule="chimera", model=task.model(seed=1 + rank)
    )
    with pipe:
        assert_copies_equal(pipe)
        opt = pd2.PipelineOptimizer(adamw(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        assert_copies_equal(pipe)


def both_ends_are_given_the_batch(rank: int, d: int) -> None:
    """Only they need it; the loss and the model's output are where they are said to be."""
    task, m = TASKS["skips"], d
    batches = task.batches([2 * m] * 4)
    want = by_oracle(task, batches, m, schedule="chimera")
    with make_pipeline(task, d, m, batches[0], schedule="chimera") as pipe:
        ends = rank in (0, d - 1)
        assert pipe.is_first_stage == pipe.is_last_stage == ends
        assert pipe.stages == sorted({rank, d - 1 - rank})
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches:
            args, target = (batch.args, batch.target) if ends else ((), None)
            losses.append(pipe.train_step(*args, target=target))
            opt.step()
        assert [float(loss) for loss in losses] == want.losses
        with torch.no_grad():
            output = pipe(*(batches[0].args if rank == 0 else ()))
        assert (output is not None) == pipe.gives_output == (rank == d - 1)
        full = pipe.full_state_dict()
        if rank == 0:
            assert full.keys() == want.state.keys()
            assert all(torch.equal(full[name], want.state[name]) for name in full)
        else:
            assert full == {}
        (x,) = batches[0].args
        for wrong, message in (
            (x[:-1] if rank == d - 1 else x, "rows of the arguments"),
            (x.double() if rank == d - 1 else x, "their shapes or dtypes differ"),
            (x[:1], "rows of the batch: 1, at least 2 needed: each of the schedule's 2 pipelines"),
        ):
            target = batches[0].target[: wrong.shape[0]] if ends else None
            with pytest.raises(ValueError, match=message):
                pipe.train_step(wrong, target=target)
        pipe.train_step(*batches[0].args, target=batches[0].target)  # it is still usable
        opt.step()


def what_is_set_on_one_copy_is_set_on_both(rank: int, d: int) -> None:
    """A checkpoint of this rank's parts, and one of the whole model; buffers are pipeline 0's."""
    task, m = TASKS["skips"], d
    batches = task.batches([2 * m] * 6)
    want = by_oracle(task, batches, m, adamw, schedule="chimera")
    saved: list[Any] = []
    for part in (batches[:3], batches[3:]):
        with make_pipeline(task, d, m, batches[0], schedule="chimera") as pipe:
            opt = pd2.PipelineOptimizer(adamw(pipe.parameters()))
            if saved:
                pipe.load_state_dict(saved[0], strict=False)
                opt.load_state_dict(saved[1])
                assert_copies_equal(pipe)
            for batch in part:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            assert_copies_equal(pipe)
            saved = [copy_of(pipe.state_dict()), opt.state_dict()]
            for index, state in saved[1]["state"].items():
                saved[1]["state"][index] = copy_of(state)
    for name, tensor in saved[0].items():
        assert (tensor - want.state[name]).norm() <= 1e-6 * want.state[name].norm(), name

    if d not in TASKS["batch norm"].depths:
        return
    task = TASKS["batch norm"]
    (batch,) = task.batches([4 * m])
    with make_pipeline(task, d, m, batch, schedule="chimera") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
        full = pipe.full_state_dict()
        model = task.model()
        for half in batch.args[0].tensor_split(m)[: m // 2]:
            model(half)
        for name, value in model.state_dict().items() if full else ():
            if "running" in name:
                assert torch.equal(full[name], value), name


def replicas_average(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    for name, make in (("mlp", sgd), ("skips", adamw)):
        task = TASKS[name]
        by_replica = [task.batches([8 + r] * 4, seed=10 + r) for r in range(2)]
        replicas_follow_the_mean(task, by_replica, make, 2, 4, schedule="chimera")


def fails(rank: int, world_size: int) -> dict[str, Any]:
    """A stage of the second pipeline fails in batch 1."""
    d = world_size
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(d)]
    pipe = pd2.PipelineModule(
        layers,
        mse_loss,
        num_microbatches=d,
        schedule="chimera",
        example_args=(torch.zeros(1, 4),),
        timeout=300.0,
    )
    if rank == 0:  # its stage of the second pipeline is the last
        (stage,) = (stage for stage in pipe.session.stages if stage.index >= d)
        stage.runner.loss_fn = _raise_in_second_batch(d // 2)
    start, seen = time.monotonic(), {"kind": "", "text": ""}
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    x = torch.arange(8.0 * d).reshape(2 * d, 4).sin()
    try:
        for _ in range(6):
            pipe.train_step(x, target=x.cos())
            optimizer.step()
        pipe.flush()
    except RuntimeError as error:
        seen = {"kind": type(error).__name__, "text": str(error)}
    return {**seen, "seconds": time.monotonic() - start}


def _raise_in_second_batch(num_microbatches: int) -> Any:
    calls = [0]

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > num_microbatches:
            raise ZeroDivisionError("on purpose")
        return mse_loss(output, target)

    return fail


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_stages", [2, *exhaustive(4)])
def test_two_pipelines_in_processes_equal_the_definition(num_stages: int) -> None:
    """With replicas that average, too; and a failure in one pipeline ends all ranks."""
    checks = [train_everything, *([replicas_average] if num_stages == 4 else []), fails]
    for result in run_ranks(in_turn, num_stages, args=checks, timeout=180):
        failure = result.value[-1]
        assert failure["kind"] == "StageError", result
        last = num_stages - 1
        place = f"stage {last} in pipeline 1, batch 1, microbatch {num_stages // 2}, forward"
        assert place in failure["text"], result
        assert "ZeroDivisionError: on purpose" in failure["text"]
        assert failure["seconds"] < SOON
