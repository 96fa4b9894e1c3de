"""``torch.distributed.checkpoint`` saves and loads a pipeline and its optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.samples.models import TASKS

TASK = TASKS["gpt"]  # tied weights on the first and the last stage
BATCHES = TASK.batches([4] * 4)


def adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)]


def momentum(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.01, momentum=0.9)]


def muon_and_rmsprop(parameters: Any) -> list[torch.optim.Optimizer]:
    given = list(parameters)
    return [
        torch.optim.Muon([{"params": [p for p in given if p.dim() == 2]}], lr=0.01),
        torch.optim.RMSprop([{"params": [p for p in given if p.dim() != 2]}], lr=0.01),
    ]


MAKES = [adamw, momentum, muon_and_rmsprop]


def made(depth: int, number: int, seed: int) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    pipe = pd2.PipelineModule(
        TASK.model(seed=seed),
        TASK.loss_fn,
        num_stages=depth,
        num_microbatches=4,
        example_args=BATCHES[0].args,
    )
    return pipe, pd2.PipelineOptimizer(*MAKES[number](pipe.parameters()))


def tensors(value: Any, where: str = "") -> dict[str, torch.Tensor]:
    """Copies of all tensors of nested dictionaries and lists, by their path."""
    if isinstance(value, torch.Tensor):
        return {where: value.clone()}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    nested = [(key, each) for key, each in items if isinstance(each, (dict, list, torch.Tensor))]
    return {path: t for key, each in nested for path, t in tensors(each, f"{where}/{key}").items()}


def state_of(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer) -> dict[str, torch.Tensor]:
    return tensors({"model": pipe.state_dict(), "optim": opt.state_dict()})


def saving(rank: int, world_size: int, folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(len(MAKES)):
        pipe, opt = made(world_size, number, seed=1)
        with pipe:
            for batch in BATCHES[:3]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            save({"model": pipe, "optim": opt}, checkpoint_id=f"{folder}/{number}")
            found.append(state_of(pipe, opt))
    return found


def loading(rank: int, world_size: int, folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(len(MAKES)):
        pipe, opt = made(world_size or 2, number, seed=2)
        with pipe:
            assert isinstance(pipe, Stateful)
            assert isinstance(opt, Stateful)
            opt.init_state()
            load({"model": pipe, "optim": opt}, checkpoint_id=f"{folder}/{number}")
            found.append(state_of(pipe, opt))
            pipe.train_step(*BATCHES[3].args, target=BATCHES[3].target)
            opt.step()
    return found


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


@pytest.mark.timeout(240)
def test_what_two_ranks_save_three_ranks_and_one_process_load(tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = [result.value for result in run_ranks(saving, 2, args=(folder,))]
    loaded = [result.value for result in run_ranks(loading, 3, args=(folder,))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loading without other processes
        alone = loading(0, 0, folder)
    names = set(dict(TASK.model().named_parameters()))
    for number, make in enumerate(MAKES):
        want = merged([of_rank[number] for of_rank in saved])
        assert {path.split("/")[2] for path in want if path.startswith("/model")} >= names
        moments = {p for p in want if p.startswith("/optim")}
        assert {path.split("/")[-2] for path in moments} == names, make
        for got in (merged([of_rank[number] for of_rank in loaded]), alone[number]):
            assert set(got) == set(want), make
            for path, value in want.items():
                assert torch.equal(got[path], value), path


def test_a_load_without_room_for_the_state_fails_and_loads_no_step(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe, opt = made(2, 0, seed=1)
        with pipe:
            pipe.train_step(*BATCHES[0].args, target=BATCHES[0].target)
            opt.step()
            save({"optim": opt}, checkpoint_id=str(tmp_path))
        pipe, opt = made(2, 0, seed=1)
        with pipe, pytest.raises(BaseException, match=r"call init_state\(\)"):
            load({"optim": opt}, checkpoint_id=str(tmp_path))


def test_room_for_the_state_leaves_the_optimizer_as_it_is() -> None:
    states = []
    for with_room in (False, True):
        pipe, opt = made(2, 0, seed=1)  # which decays weights without gradients, too
        with pipe:
            if with_room:
                opt.init_state()
                room = opt.state_dict()["state"]
                assert all(state["exp_avg"].shape for state in room.values())
            pipe.train_step(*BATCHES[0].args, target=BATCHES[0].target)
            opt.step()
            states.append(state_of(pipe, opt))
    assert all(torch.equal(states[1][path], value) for path, value in states[0].items())
    pipe = pd2.PipelineModule(
        TASK.model(), TASK.loss_fn, num_stages=2, num_microbatches=4, example_args=BATCHES[0].args
    )
    with pipe:
        corrected = pd2.PipelineOptimizer(
            torch.optim.SGD(pipe.parameters(), lr=0.1), staleness=pd2.ErrorFeedback()
        )
        with pytest.raises(ValueError, match="staleness: ErrorFeedback"):
            corrected.init_state()
        state = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["nowhere"]}]}
        with pytest.raises(ValueError, match="nowhere: no parameter of the model"):
            corrected.load_state_dict(state)
