"""Where another run saves to the folder, all ranks stop alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.saved import saved

X = torch.ones(4, 8)


def finds_another(rank: int, world: int, folder: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=world, num_microbatches=2, example_args=(X,)
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    with pipe, pd2.Checkpointer(folder, pipe, opt, every=1, preempt=()) as ckpt:

        def train() -> None:
            pipe.train_step(X, target=X)
            opt.step()
            ckpt.step()

        def wait() -> None:
            pipe.flush()
            for saving in ckpt.under_way:
                saving.wait()

        train()
        wait()
        if rank == 0:
            mine = saved(folder, 1)
            shutil.copytree(mine, mine.with_name("step-00000001-ffffffff0001"))
        train()
        wait()
        with pytest.raises(OSError, match=r"another run saves there, too \(step-00000001-"):
            train()


def test_all_ranks_stop_where_rank_0_finds_another_run(tmp_path: Path) -> None:
    run_ranks(finds_another, 2, args=(str(tmp_path),), timeout=60)
