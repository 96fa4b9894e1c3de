"""Under processes every rank makes or reads its own stages' parameters alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import pipedream2bw as pd2
from pipedream2bw.model import checkpoint
from tests.references.oracle import Batch, Oracle
from tests.runs.launch import run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt
from tests.runs.trajectory import Trajectory, assert_same, copy_of, make_pipeline, sgd
from tests.samples.large_models import deferred, layers, loadable
from tests.samples.models import TASKS, Task

draw = TASKS["mlp"].draw
M = 4


def check(task: Task, pipe: pd2.PipelineModule, model: Any, width: int) -> None:
    """Trains; this rank's part must be the oracle's, the others' must have no memory."""
    mine = {id(parameter) for parameter in pipe.parameters()}
    for name, parameter in model.named_parameters():
        has_memory = not parameter.is_meta and parameter.untyped_storage().nbytes() > 0
        assert has_memory == (id(parameter) in mine), name
    by_replica = [task.batches([8] * 4, seed=seed) for seed in range(width)]
    whole = task.model(seed=3)
    oracle = Oracle(whole, sgd(whole.parameters()), M, task.loss_fn, delay=1)
    want = [oracle.train_replicas(each)[pipe.replica] for each in zip(*by_replica, strict=True)]
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in by_replica[pipe.replica]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        state = copy_of(pipe.state_dict())
        parameters = dict(pipe.named_parameters(remove_duplicate=False))
        if width > 1:  # statistics are each replica's own
            state = {name: value for name, value in state.items() if name in parameters}
        assert state
        all_of_it = copy_of(whole.state_dict())
        assert_same(
            Trajectory([loss.item() for loss in losses], state),
            Trajectory(want, {name: all_of_it[name] for name in state}),
        )


def pipeline(task: Task, world: int, width: int, model: Any) -> pd2.PipelineModule:
    d = world // width
    example: Batch = task.batches([4])[0]
    split = [str(4 // d * i) for i in range(1, d)]
    return make_pipeline(task, d, M, example, model=model, width=width, split=split)


def everything(rank: int, world: int, width: int, folder: Path) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    task = Task(layers, draw)
    model = deferred(layers, seed=3)
    check(task, pipeline(task, world, width, model), model, width)

    task = Task(loadable, draw)
    read: list[str] = []
    mapped = checkpoint._read_torch_file

    def noting(path: Path) -> Any:
        read.append(path.name)
        return mapped(path)

    checkpoint._read_torch_file = noting
    outcomes = {}
    for file in ("model.safetensors", "model.pt", "dcp"):
        with torch.device("meta"):
            model = loadable()
        pipe = pipeline(task, world, width, model)
        batch = task.batches([8])[0]
        if file == "dcp":
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            step = functools.partial(pipe.train_step, *batch.args, target=batch.target)
            outcomes["unloaded"] = attempt(step)
            for name in ("missing.pt", "shape.pt", "nowhere.pt"):
                # Only one rank finds the wrong one.
                path = folder / (name if rank == world - 1 else "model.pt")
                outcomes[name] = attempt(functools.partial(pipe.load_checkpoint, path))
            outcomes["unexpected.pt"] = attempt(
                functools.partial(pipe.load_checkpoint, folder / "unexpected.pt")
            )
            del opt
        pipe.load_checkpoint(folder / file)
        check(task, pipe, model, width)
    assert set(read) >= {"model.pt", "unexpected.pt"}
    return outcomes


OUTCOMES: Expected = {
    "unloaded": ("ValueError", ["without values"]),
    "missing.pt": ("RuntimeError", ["missing keys: ['5.weight']"]),
    "shape.pt": ("RuntimeError", ["size mismatch for 5.weight"]),
    "nowhere.pt": ("ValueError", ["nowhere.pt does not exist"]),
    "unexpected.pt": ("RuntimeError", ["unexpected keys: ['6.weight']"]),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 2)])
def test_ranks_make_or_read_their_own_part(width: int, num_stages: int, tmp_path: Path) -> None:
    state = Task(loadable, draw).model(seed=3).state_dict()
    once = {name: value for name, value in state.items() if name != "2.up.weight"}
    save_file(
        {name: value.contiguous() for name, value in once.items()}, tmp_path / "model.safetensors"
    )
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "model.pt")
    torch.save(state | {"6.weight": torch.zeros(1)}, tmp_path / "unexpected.pt")
    torch.save(state | {"5.weight": torch.zeros(1)}, tmp_path / "shape.pt")
    del state["5.weight"]
    torch.save(state, tmp_path / "missing.pt")
    ranks = run_ranks(everything, width * num_stages, args=[width, tmp_path], timeout=280)
    assert_raised((result.value for result in ranks), OUTCOMES)
