"""Ends of pipelines in processes: what can still be read, whom a save waits for, exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.sites import Setting, join_site, pipe_of, sync_of

X, Y = torch.ones(8, 4), torch.zeros(8, 4)
KEPT: list[Any] = []  # until the interpreter ends


def end(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(0)
    with pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=4, example_args=(X,)
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(2):
            pipe.train_step(X, target=Y)
            opt.step()
        saving = pd2.save(folder, pipe, opt)
        with pytest.raises(RuntimeError, match=r"Call wait\(\) of the save on every rank"):
            saving.done.result()
        saving.wait()
        saving.done.result()
        want = {name: value.clone() for name, value in pipe.state_dict().items()}
    assert all(torch.equal(value, want[name]) for name, value in pipe.state_dict().items())
    opt.state_dict()
    with pytest.raises(RuntimeError, match=r"Call it before close\(\), or state_dict\(\)"):
        pipe.full_state_dict()


def test_what_a_closed_pipeline_gives_on_its_rank(tmp_path: Path) -> None:
    run_ranks(end, 2, args=(str(tmp_path),), timeout=60)


def leave_open(rank: int, world: int, folder: str) -> None:
    site, store = join_site(folder, "exit", rank, 1)
    setting = Setting()
    pipe = pipe_of(setting, site)
    opt = pd2.PipelineOptimizer(
        setting.sgd(pipe.parameters()), replica_sync=sync_of(setting, store, site)
    )
    for batch in setting.data()[site][0]:
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
    pipe.flush()
    KEPT.append((pipe, opt, store))


def test_sites_that_close_nothing_end_with_the_interpreter(tmp_path: Path) -> None:
    results = run_ranks(leave_open, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
    assert [result.exit_code for result in results] == [0, 0]
