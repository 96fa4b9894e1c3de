"""Ends of pipelines in processes: what can still be read, whom a save waits for, exits."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint import writing
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
        # A flush brings the copies, too, though the thread that writes may see them later.
        with patch.object(writing, "wait_for", lambda events: time.sleep(0.5)):
            saving = pd2.save(folder, pipe, opt)
            pipe.flush()
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


def look_elsewhere(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=4, example_args=(X,)
    ) as pipe:
        other = model[1 - rank]
        assert isinstance(other.weight, nn.Parameter)
        assert (tuple(other.weight.shape), other.weight.numel(), other.weight.dtype) == (
            (4, 4),
            16,
            torch.float32,
        )
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 40
        for read in (
            lambda: other.weight.clone(),
            lambda: other.weight.data,
            lambda: other.weight.detach(),
            lambda: float(other.bias.sum()),
            lambda: other(X),
            lambda: copy.deepcopy(model),
            lambda: repr(other.weight),
            model.state_dict,
            lambda: torch.save(model, io.BytesIO()),
            lambda: other.weight.tolist(),
        ):
            with pytest.raises(RuntimeError, match=r"of a stage in another process.*pipe\."):
                read()
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        float(pipe.train_step(X, target=Y))
        opt.step()
        pipe.eval()(X)  # captured again
        with pytest.raises(RuntimeError, match="in another process"):
            other.weight.clone()
        assert len(pipe.full_state_dict()) == (4 if rank == 0 else 0)


def test_a_parameter_of_another_process_says_where_it_is() -> None:
    run_ranks(look_elsewhere, 2, timeout=60)
